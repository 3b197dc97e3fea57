"""Run every attack on edgellm from outside, and count trials and harm.

    python -m bench.robustness.attack [ATTACK ...] [--quick]
    python -m bench.robustness.attack --list

Each attack runs in a process of its own, whose death is harm, too. Its row in `bench/results/robustness/attack.json` is
replaced; the rows of other attacks stay. Columns: trials, and how many of them did harm. Exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.harness.report import machine, place, write
from bench.robustness.attack.harness import attacks
from testkit import ROOT

SHOWN = 5  # harmful trials that are kept, for each attack
PATIENCE = 4 * 3600.0  # seconds for one attack: 1,680 command lines take more than one hour


def attempt(name: str, quick: bool) -> dict[str, Any]:
    """Run one attack in a process of its own and return its row."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bench.robustness.attack", name, "--child", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, timeout=PATIENCE)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        output, code = "", -1
    if code:
        found: dict[str, Any] = {"tried": 1, "wrong": [f"the attacking process ended with {code}"], "figures": {}}
    else:
        found = json.loads(output.splitlines()[-1])
    row = {"name": name, "about": attacks()[name].about, **found, "harmed": len(found["wrong"])}
    row["wrong"] = row["wrong"][:SHOWN]
    return row | {"seconds": time.perf_counter() - began, "load_average": os.getloadavg()[0], "machine": machine()}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each attack: trials, harmful trials, and its figures."""
    lines = [f"{'attack':<22}{'tried':>8}{'wrong':>7}  what was tried"]
    for row in found["rows"]:
        lines.append(f"{row['name']:<22}{row['tried']:>8,}{row['harmed']:>7}  {row['about']}")
        if row["figures"]:
            lines.append(f"{'':<39}{', '.join(f'{name} {value:g}' for name, value in row['figures'].items())}")
    tried, harmed = (sum(row[column] for row in found["rows"]) for column in ("tried", "harmed"))
    lines += [f"{tried:,} trials, {harmed} of them did harm", "to repeat one: python -m bench.robustness.attack NAME"]
    return "\n".join(lines) + "\n"


def kept(name: str) -> dict[str, Any]:
    """Return the rows of the last results by attack, of those that still exist."""
    path = place("bench.robustness.attack", name)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return {row["name"]: row for row in rows if row["name"] in attacks()}


def published(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Write a row into the results at once, so that an interruption of a later attack keeps it; return all rows."""
    rows = kept(name) | {row["name"]: row}
    figures = {
        "command": "python -m bench.robustness.attack",  # for all rows, whichever this run measured
        "rows": [rows[known] for known in attacks() if known in rows],
    }
    write(name, "bench.robustness.attack", figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="names of attacks; all by default")
    parser.add_argument("--quick", action="store_true", help="few trials")
    parser.add_argument("--list", action="store_true", help="list the attacks")
    parser.add_argument("--name", default="attack", help="of the result file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = attacks()
    if arguments.list:
        print("\n".join(f"{name:22} {attack.about}" for name, attack in known.items()))
        return
    if unknown := [name for name in arguments.attacks if name not in known]:
        parser.error(f"there is no attack {unknown[0]!r}: choose from {', '.join(known)}")
    if arguments.child:
        print(json.dumps(asdict(known[arguments.attacks[0]].run(arguments.quick))))
        return
    chosen = arguments.attacks or list(known)
    for name in chosen:
        row = attempt(name, arguments.quick)
        print(f"{name}: {row['tried']:,} tried, {row['harmed']} wrong", flush=True)
        for sentence in row["wrong"]:
            print(f"  {sentence}", flush=True)
        figures = published(arguments.name, row)
    print(table(figures))
    sys.exit(1 if any(row["harmed"] for row in figures["rows"] if row["name"] in chosen) else 0)


if __name__ == "__main__":
    main()

"""Synera's evidence in one command: every benchmark behind a figure or a table of the paper.

    python -m bench.synera [PART ...] [--quick]          # or: edgellm bench synera
    python -m bench.synera --list

Each part prints a table, writes `bench/results/NAME.json` and, where matplotlib is there, draws `NAME.png`. `--quick`
takes few cases, to see that all works; what it writes goes to `quick-NAME`, and is no evidence.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import bandwidth, compression, exits, many_devices, paths, scheduler_cost, stalls, synera_quality
from bench.figures import FIGURES
from bench.report import RESULTS


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark, what it stands beside in the paper, and the options of a quick run."""

    module: str
    about: str
    quick: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.module.removeprefix("bench.")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "synera_quality": lambda found: "\n".join(synera_quality.table(found, budget) for budget in found["budgets"]),
    "stalls": lambda found: stalls.table(found["ways"]),
    "bandwidth": lambda found: bandwidth.table(found["networks"]),
    "exits": lambda found: exits.table(found["thresholds"]),
    "paths": lambda found: paths.table(found["ways"]),
    "compression": lambda found: compression.table(found["requests"]),
    "scheduler_cost": lambda found: scheduler_cost.table(found["costs"]),
    "many_devices": many_devices.table,
}

PARTS = {
    "quality": Part(
        "bench.synera_quality",
        "quality of every gate at a budget (Table 4, Fig. 14)",
        ("--cases", "10", "--budgets", "0.2"),
    ),
    "stalls": Part("bench.stalls", "time between tokens, hit rate and stall hidden (4.4)", ("--cases", "1")),
    "bandwidth": Part("bench.bandwidth", "time between tokens against bandwidth (Fig. 13)", ("--megabits", "1", "10")),
    "compression": Part("bench.compression", "bytes of a verified chunk (4.2)", ("--cases", "4", "--chunks", "4")),
    "devices": Part(
        "bench.many_devices",
        "verifier latency against request rate (Fig. 15)",
        ("--seconds", "3", "--repeats", "1", "--rounds", "3", "--rates", "0.5", "1.0"),
    ),
    "scheduler": Part("bench.scheduler_cost", "cost of scheduling (Fig. 18)", ("--rounds", "4", "--repeats", "1")),
    "exits": Part("bench.exits", "sweep of the early exit's threshold (Fig. 17)", ("--cases", "4")),
    "paths": Part("bench.paths", "budget 1.0 is the verifier alone, on every way", ("--prompts", "16")),
}


def run(part: Part, quick: bool) -> int:
    """Runs one part in a process of its own; its exit code."""
    name = f"quick-{part.name}" if quick else part.name
    print(f"\n{part.about}", flush=True)
    code = subprocess.call([sys.executable, "-m", part.module, *(part.quick if quick else ()), "--name", name])
    if code == 0 and (drawn := draw(part.name, name)) is not None:
        print(f"drawn: {drawn}", flush=True)
    return code


def draw(kind: str, name: str) -> Path | None:
    """The figure of a result; None where there is none to draw, or no matplotlib."""
    if kind not in FIGURES:
        return None
    figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return FIGURES[kind](figures, RESULTS / f"{name}.png")


def shown(part: Part) -> str:
    """The table of a part's last result, with the command that repeats it."""
    path = RESULTS / f"{part.name}.json"
    if not path.is_file():
        return f"{part.about}: not measured yet"
    found = json.loads(path.read_text(encoding="utf-8"))
    where = f"{found['machine']['cores']} cores of {found['machine']['processor']}"
    return f"{part.about}\n{found['command']}\non {where}\n\n{TABLES[part.name](found)}".rstrip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--show", action="store_true", help="print the tables of the last results, and run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:12} {part.about}" for name, part in PARTS.items()))
        return
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if arguments.show:
        print("\n".join(shown(PARTS[name]) for name in arguments.parts or PARTS))
        return
    failed = [name for name in arguments.parts or PARTS if run(PARTS[name], arguments.quick)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

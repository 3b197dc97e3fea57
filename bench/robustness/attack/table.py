"""Run every attack on edgellm from outside, and count trials and harm.

    python -m bench.robustness.attack [ATTACK ...] [--quick]
Each attack runs in a process of its own, whose death is harm, too. Its row of the result is replaced; the rows of other
attacks stay. Columns: trials, and how many of them did harm.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from bench.harness.children import Crashed, in_child
from bench.harness.progress import track
from bench.harness.results import Figures, machine
from bench.harness.settings import Earlier
from bench.robustness.attack.harness import attacks as all_attacks
from edgellm.errors import InvalidOption

SHOWN = 5  # harmful trials that are kept, for each attack


def attempt(name: str, few: bool) -> Figures:
    """Run one attack in a process of its own and return its row."""
    began = time.perf_counter()
    try:
        found = in_child(__name__, "tried", name, few)
    except Crashed as crash:
        found = {"tried": 1, "wrong": [f"the attacking process ended: {crash}"], "figures": {}}
    row = {"name": name, "about": all_attacks()[name].about, **found, "harmed": len(found["wrong"])}
    return row | {"wrong": row["wrong"][:SHOWN], "seconds": time.perf_counter() - began, "machine": machine()}


def tried(name: str, few: bool) -> Figures:
    """Run one attack in this process, and return what it found."""
    return asdict(all_attacks()[name].run(few))


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each attack: trials, harmful trials, and its figures."""
    lines = [f"{'attack':<22}{'tried':>8}{'wrong':>7}  what was tried"]
    for row in found["rows"]:
        lines.append(f"{row['name']:<22}{row['tried']:>8,}{row['harmed']:>7}  {row['about']}")
        if row["figures"]:
            lines.append(f"{'':<39}{', '.join(f'{name} {value:g}' for name, value in row['figures'].items())}")
    tried, harmed = (sum(row[column] for row in found["rows"]) for column in ("tried", "harmed"))
    lines += [
        f"{tried:,} trials, {harmed} of them did harm",
        "to repeat one: python -m bench run robustness/attack --attacks NAME",
    ]
    return "\n".join(lines) + "\n"


def measure(
    earlier: Earlier,
    attacks: Annotated[Sequence[str], "none for all"] = (),
    few: Annotated[bool, "few trials of each"] = False,
) -> Iterator[Figures]:
    """Yield the rows so far, after each attack; those of attacks that are not tried stay."""
    known = all_attacks()
    if unknown := set(attacks) - known.keys():
        raise InvalidOption(f"There is no attack {', '.join(unknown)}.", f"Choose from {', '.join(known)}.")
    rows = {row["name"]: row for row in earlier.get("rows", ())}
    for name in track(attacks or list(known), "attacks"):
        rows[name] = attempt(name, few)
        yield {"rows": [rows[one] for one in known if one in rows]}


def failures(found: Figures) -> list[str]:
    """Return the attacks that did harm, each with its first sentence."""
    return [f"{row['name']}: {row['wrong'][0]}" for row in found["rows"] if row["harmed"]]

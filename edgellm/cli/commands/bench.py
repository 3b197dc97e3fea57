"""`edgellm bench`: the measurements of a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgellm.errors import InvalidOption

SUITES = ("synera", "retrieval", "coldstart", "reliability")
ROOT = Path(__file__).resolve().parents[3]


def bench(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="What to measure: synera, retrieval, coldstart or reliability.")
    ],
    parts: Annotated[list[str] | None, typer.Argument(metavar="PART", help="Some of it only; see --list.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases: to see that all works, and no evidence.")] = False,
    list_parts: Annotated[bool, typer.Option("--list", help="What there is to measure.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the last results, and measure nothing.")] = False,
) -> None:
    if suite not in SUITES:
        raise InvalidOption(f"There is no suite named {suite!r}.", f"Choose one of {', '.join(SUITES)}.")
    if not (ROOT / "bench" / f"{suite}.py").is_file():
        raise InvalidOption(
            f"The benchmarks are not installed: {ROOT} is no checkout.", "Clone the repository, and run it there."
        )
    options = [option for option, given in (("--quick", quick), ("--list", list_parts), ("--show", show)) if given]
    command = [sys.executable, "-m", f"bench.{suite}", *(parts or ()), *options]
    raise typer.Exit(subprocess.call(command, cwd=ROOT))

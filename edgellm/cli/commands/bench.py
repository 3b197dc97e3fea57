"""`edgellm bench`: run the benchmarks of a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgellm.cli.options import DRAFT, VERIFIER, HardwareOptions, only, refuse_given, with_records
from edgellm.errors import InvalidOption

ROOT = Path(__file__).resolve().parents[3]
_SUITES = "synera, coordgen, papers, csgo, mesh, engine, models, real, clients, cli, upstream or robustness"


@with_records
def bench(
    ctx: typer.Context,
    hardware: Annotated[HardwareOptions, only(shown="the benchmark's own")],
    suite: str = typer.Argument(..., metavar="SUITE", help=f"Suite: {_SUITES}."),
    parts: list[str] | None = typer.Argument(None, metavar="PART", help="Parts to run; see --list. Default: all."),
    quick: bool = typer.Option(False, "--quick", help="Use few cases: a check that it works, not evidence."),
    list_parts: bool = typer.Option(False, "--list", help="List the parts of the suite."),
    show: bool = typer.Option(False, "--show", help="Print the last results without measuring."),
) -> None:
    for role in (VERIFIER, DRAFT):
        hardware.of(role)
    if not (ROOT / "bench" / "suites.toml").is_file():
        raise InvalidOption(
            f"The benchmarks are not installed: {ROOT} is not a checkout.", "Clone the repository and run it there."
        )
    task = "list" if list_parts else "show" if show else "run"
    names = [f"{suite}/{part}" for part in parts] if parts else [suite]
    if task != "run":
        refuse_given(ctx, hardware.given, f"has no meaning with --{task}: nothing is measured", "Leave it out.")
    words = hardware.words() if task == "run" else ()
    command = [sys.executable, "-m", "bench", task, *names, *(["--quick"] if quick else []), *words]
    raise typer.Exit(subprocess.call(command, cwd=ROOT))

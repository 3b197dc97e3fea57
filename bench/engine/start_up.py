"""Time whole processes of the command line: `edgellm --help`, `edgellm --version`, and a question to the bundled pair.

    python -m bench.engine.start_up [--checkout PATH] [--repeats 5]

The commands are those of a checkout's own environment, `PATH/.venv/bin/edgellm`. They take turns, and share a home that
is empty at first and that an untimed question has filled with what is measured once for each pair.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import spread
from testkit import ROOT

COMMANDS = {
    "help": ("--help",),
    "version": ("--version",),
    "question": ("chat", "Where are the spare fuses?"),
}


def seconds(checkout: Path, arguments: tuple[str, ...], home: str) -> float:
    """Return the seconds of one process. Raise CalledProcessError if it fails."""
    own = checkout / ".venv" / "bin" / "edgellm"
    command = [str(own)] if own.exists() else [sys.executable, "-m", "edgellm"]
    environment = {**os.environ, "EDGELLM_HOME": home, "PYTHONPATH": str(checkout)}
    started = perf_counter()
    subprocess.run([*command, *arguments], env=environment, cwd=home, check=True, capture_output=True)
    return perf_counter() - started


def table(figures: Mapping[str, Any]) -> str:
    """Return a line for each command."""
    lines = [f"{'seconds of a process':<24}{'median':>8}{'q1':>8}{'q3':>8}"]
    for label, found in figures["seconds"].items():
        lines.append(f"{label:<24}{found['median']:>8.3f}{found['q1']:>8.3f}{found['q3']:>8.3f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="start_up", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        seconds(arguments.checkout, COMMANDS["question"], home)
        times: dict[str, list[float]] = {label: [] for label in COMMANDS}
        for _ in range(arguments.repeats):
            for label, words in COMMANDS.items():
                times[label].append(seconds(arguments.checkout, words, home))
    figures = {"seconds": {label: spread(found) for label, found in times.items()}}
    print(f"{table(figures)}written: {write(arguments.name, 'bench.engine.start_up', figures)}")


if __name__ == "__main__":
    main()

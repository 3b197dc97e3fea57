"""Compare the command line of this checkout with that of another one, by turns: what its users wait for.

    git worktree add ../before COMMIT
    python -m bench run engine/before_after --before ../before

Each command is a whole process, from the shell to its end, in a home that is empty at first and that an untimed turn
has filled with what is measured once for each pair. In every turn one checkout runs a command and then the other, in
alternating order. Without another checkout, this one alone is timed.

Columns: seconds by the clock and of the processor, and the ratios of the other checkout's to ours, taken within each
turn, with their quartiles; above 1 ours is faster.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import alternate, spread
from edgellm.errors import InvalidOption
from testkit import ROOT

LONG = "Tell me what is on the shelf, in the drawer and in the garden."
COMMANDS: Mapping[str, Sequence[str]] = {
    "help": ("--help",),
    "question": ("chat", "Where are the spare fuses?"),
    "256 tokens, verifier alone": ("chat", LONG, "--max-tokens", "256", "--draft", "none", "--retrieval", "off"),
    "256 tokens, pair": ("chat", LONG, "--max-tokens", "256"),
    "256 tokens, sampled": ("chat", LONG, "--max-tokens", "256", "--temperature", "0.8", "--seed", "1"),
}
CLOCKS = ("clock", "processor")


def taken(checkout: Path, words: Sequence[str], home: Path, kept: list[float]) -> float:
    """Return the seconds of one process, and keep those of its processor. Raise CalledProcessError if it fails."""
    own = checkout / ".venv" / "bin" / "python"  # its libraries may be others
    command = [str(own) if own.exists() else sys.executable, "-m", "edgellm", *words]
    environment = {**os.environ, "EDGELLM_HOME": str(home), "PYTHONPATH": str(checkout)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    seconds, after = perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    kept.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return seconds


def measure(before: Annotated[Path | None, "the other checkout"] = None, turns: int = 7) -> Figures:
    """Return the seconds of every command, and the ratios of both checkouts."""
    if before is not None and not (before / "edgellm").is_dir():
        raise InvalidOption(f"{before} is no checkout.", "Make one: git worktree add ../before COMMIT")
    checkouts = [ROOT, *([before.resolve()] if before is not None else [])]
    rows: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(number) for number in range(len(checkouts))]
        for home in homes:
            home.mkdir()
        for name, words in track(COMMANDS.items(), "commands"):
            processor: list[list[float]] = [[] for _ in checkouts]
            runs = [
                partial(taken, *one) for one in zip(checkouts, [words] * len(checkouts), homes, processor, strict=True)
            ]
            alternate(1, *runs)
            for seconds in processor:
                seconds.clear()
            both = dict(zip(CLOCKS, (alternate(turns, *runs), processor), strict=True))
            rows[name] = {clock: spread(ours) for clock, (ours, *_) in both.items()}
            if before is not None:
                rows[name]["ratios"] = {
                    clock: spread([theirs / ours for ours, theirs in zip(*both[clock], strict=True)])
                    for clock in CLOCKS
                }
    return {"turns": turns, "rows": rows}


def table(found: Figures) -> str:
    """Return a line for each command."""
    lines = [f"{'seconds of a process':<28}{'clock':>8}{'processor':>11}{'before / now':>26}{'in processor time':>26}"]
    for name, row in found["rows"].items():
        ratios = [f"{one['median']:.3f} ({one['q1']:.3f} to {one['q3']:.3f})" for one in row.get("ratios", {}).values()]
        times = f"{row['clock']['median']:>8.3f}{row['processor']['median']:>11.3f}"
        lines.append(f"{name:<28}{times}{''.join(f'{ratio:>26}' for ratio in ratios)}")
    return "\n".join(lines) + "\n"

"""Compare the speed of this checkout with that of another one: their own benchmarks take turns.

    git worktree add ../before COMMIT
    python -m bench.engine.before_after ../before [PART ...] [--turns 7]

Each part is a small run of a benchmark that both checkouts have, in a process of its own. In every turn one checkout
runs it and then the other, in alternating order; a ratio (speed now by speed before, above 1: faster) is taken within
each turn. Columns: the median and the quartiles of the ratios. `--least` is the median below which the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import spread
from testkit import ROOT

RESULT = "quick-before-after"  # the name of each run's result


@dataclass(frozen=True, slots=True)
class Part:
    """A small run of a benchmark, and the figures to take from its result: label -> keys into the JSON, or a function
    of it.

    Figures in `times` are better when lower, all others when higher.
    """

    module: str
    arguments: tuple[str, ...]
    figures: Mapping[str, tuple[str | int, ...] | Callable[[Any], float]]
    times: bool = field(default=True)
    from_here: bool = field(default=False)
    """Whether this checkout's benchmark takes the other checkout as `--checkout`."""

    def command(self, checkout: Path) -> list[str]:
        """Return the module and arguments of the run in `checkout`."""
        where = ["--checkout", str(checkout)] if self.from_here else []
        return [self.module, *self.arguments, *where, "--name", RESULT]


HOMES = ("the first home", "the second", "the third")


def planned_start(home: int, found: Any) -> float:
    """Return the seconds to the first token with the planned split of one home."""
    each = found["each"][home]
    return float(each["measured"][each["planned"]["ways"]["planned"]["split"]]["ttft_s"])


PARTS = {
    "decode": Part(
        "bench.engine.decode_loop",
        ("--repeats", "60"),
        {
            "a token, bundled draft model": ("models", 0, "processor", "ours_ms", "median"),
            "a token, 0.5B shape": ("models", 1, "processor", "ours_ms", "median"),
        },
    ),
    "gate": Part(
        "bench.synera.gate_cost",
        ("--repeats", "20"),
        {
            "auto gate's decision, 0.5B shape": ("models", "Qwen2.5-0.5B shape, Q4_0", "gates", "auto", "decision_us"),
            "a drafted token, 0.5B shape": ("models", "Qwen2.5-0.5B shape, Q4_0", "token_us"),
            "a drafted token, bundled": ("models", "edgellm-draft", "token_us"),
        },
    ),
    "verdict": Part(
        "bench.synera.first_verdict",
        ("--models", "edgellm-verifier", "--lengths", "64", "512", "--repeats", "9"),
        {
            "first verdict, 64 tokens": ("models", "edgellm-verifier", 0, "alone", "median"),
            "first verdict, 512 tokens": ("models", "edgellm-verifier", 1, "alone", "median"),
        },
    ),
    "devices": Part(
        "bench.synera.many_devices",
        ("--seconds", "1", "--rates", "0.25", "--repeats", "5"),
        {
            "64 devices at once, requests a second": ("at_once", "worker", "median"),
            "64 devices, share of bare llama.cpp": ("at_once", "of_llama_cpp", "median"),
        },
        times=False,
    ),
    "stalls": Part(
        "bench.synera.stalls",
        ("--cases", "1"),
        {
            "time between tokens, paced device": ("ways", "synera", "time_between_tokens_ms"),
            "the same, waiting for each verdict": ("ways", "synera, waiting", "time_between_tokens_ms"),
        },
    ),
    "start": Part(
        "bench.engine.start_up",
        (),
        {
            "edgellm --help": ("seconds", "help", "median"),
            "a question in a new process": ("seconds", "question", "median"),
        },
        from_here=True,
    ),
    "cold_start": Part(
        "bench.csgo.cold_start",
        ("--fleets", "3", "--layers", "6"),
        {f"first token of a cold home, {name}": partial(planned_start, at) for at, name in enumerate(HOMES)},
    ),
}


def figures_of(part: Part, checkout: Path) -> dict[str, float]:
    """Run the part in `checkout` and return its figures by label. Raise CalledProcessError if it fails."""
    place = ROOT if part.from_here else checkout
    # `bench` has no __init__.py, so that the modules of the working directory come before the installed ones
    environment = os.environ | {"PYTHONPATH": str(place)}
    own = place / ".venv" / "bin" / "python"  # its libraries may be others
    command = [str(own) if own.exists() else sys.executable, "-m", *part.command(checkout)]
    subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)
    (result,) = (place / "bench" / "results").rglob(f"{RESULT}.json")
    found = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return {label: _at(found, keys) for label, keys in part.figures.items()}


def _at(found: Any, keys: tuple[str | int, ...] | Callable[[Any], float]) -> float:
    if callable(keys):
        return keys(found)
    for key in keys:
        found = found[key]
    return float(found)


def turns(part: Part, before: Path, count: int) -> Iterator[dict[str, float]]:
    """Yield the ratios of each turn by label: speed now by speed before."""
    for number in range(count):
        order = (before, ROOT) if number % 2 == 0 else (ROOT, before)
        found = {checkout: figures_of(part, checkout) for checkout in order}
        then, now = found[before], found[ROOT]
        yield {label: then[label] / now[label] if part.times else now[label] / then[label] for label in now}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each figure."""
    lines = [f"{'speed now by speed before':<42}{'median':>8}{'q1':>8}{'q3':>8}"]
    for label, ratio in found["ratios"].items():
        lines.append(f"{label:<42}{ratio['median']:>8.3f}{ratio['q1']:>8.3f}{ratio['q3']:>8.3f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--name", default="before_after", help="of the result file")
    arguments = parser.parse_args()
    before = arguments.before.resolve()
    if not (before / "bench").is_dir():
        parser.error(f"{before} is no checkout")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=before, capture_output=True, text=True, check=True
    )
    ratios: dict[str, dict[str, float]] = {}
    for name in arguments.parts or PARTS:
        found = list(turns(PARTS[name], before, arguments.turns))
        ratios |= {label: spread([turn[label] for turn in found]) for label in PARTS[name].figures}
        print(f"{name}: done", flush=True)
    figures = {"before": commit.stdout.strip(), "turns": arguments.turns, "ratios": ratios}
    print(f"{table(figures)}written: {write(arguments.name, 'bench.engine.before_after', figures)}")
    sys.exit(1 if any(ratio["median"] < arguments.least for ratio in ratios.values()) else 0)


if __name__ == "__main__":
    main()

"""Measure how much of an oracle's gain could be copied at all, and how much of that we take.

    python -m bench.coordgen.hindsight [--pair home|code] [--cases 40] [--name ...]

Replies of the pair's verifier are recorded and copied from, and the cost of a verification is read off a cost curve.
So nothing is timed, and a repeated run has the same digits. The curves are those of the last run of
`bench.coordgen.speed` for the pair.

Rows: `ours`; `all that stands`, a drafter with our offers that knows how many of them will stand, and drafts as many of
those as pay; and the `oracle`, which knows the reply. The gap between the last two are tokens that no source offered.
Columns: speed on each task as a multiple of plain decoding, and the share of the oracle's gain.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.coordgen.methods import Everything, Foresight, Ours
from bench.coordgen.tasks import SEED, TASKS, Reply, recorded
from bench.harness.report import read, write
from edgellm.engine import Model, block_ends
from edgellm.spec.draft_length import MAX_DRAFT, CostCurve, DraftLengthController
from edgellm.spec.params import DEFAULT_SOURCES
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round, Verdict
from edgellm.verifier.judgement import survives
from models.pairs import PAIRS

STEP = 1e-4
"""Seconds of a drafting step."""


class Knowing:
    """Drafts those of our offers that will stand, as many as pay."""

    def __init__(self, curve: CostCurve, model: Model) -> None:
        self.ours = Ours(DEFAULT_SOURCES, curve, model, Everything())
        self._rule = DraftLengthController(curve)

    def kept(self, chunk: Chunk, left: Sequence[int]) -> Chunk:
        """Return the beginning of `chunk` that pays, given that `left` follows."""
        stand = along(chunk.ids.tolist(), left)
        ids = chunk.ids[: min(stand, self._rule.choose([1.0] * stand))]
        return Chunk(ids, np.ones(len(ids), dtype=np.float32), retrieved=True)


def along(ids: Sequence[int], left: Sequence[int]) -> int:
    """Return the number of `ids` that a verifier which writes `left` accepts."""
    accepted = 0
    while accepted < min(len(ids), len(left)) and ids[accepted] == left[accepted]:
        accepted += 1
    return accepted


def speed(cases: Sequence[Reply], curve: CostCurve, method: Ours | Foresight, knowing: Knowing | None = None) -> float:
    """Return the speed over plain decoding."""
    table, prices = curve.table(), curve.head_seconds()
    seconds = tokens = 0.0
    for case in cases:
        method.begin(case)
        assert method.drafter is not None
        method.drafter.begin(GenerationState(case.prompt))
        text, at = np.concatenate((case.prompt, case.reply)).astype(np.int32), len(case.prompt)
        while at < len(text):
            left = text[at:].tolist()
            chunk = method.drafter.propose(GenerationState(text[:at]), min(MAX_DRAFT, len(left)))
            chunk = chunk if knowing is None else knowing.kept(chunk, left)
            accepted = along(chunk.ids.tolist(), left)
            looked_at = [0, *block_ends([1.0, *survives(chunk)], curve.heads)] if curve.heads else []
            heads = sum(prices[end - start] for start, end in itertools.pairwise(looked_at) if start <= accepted)
            took = STEP * isinstance(method, Ours) + table[1 + len(chunk)] + heads
            answer = np.array(left[accepted : accepted + 1], dtype=np.int32)
            verdict = Verdict(accepted, answer, took)
            turn = Round(at, chunk, Decision(True, ""), verdict, 0.0, 0.0, took)
            method.drafter.observe(GenerationState(), turn)
            at += accepted + 1
            seconds, tokens = seconds + took, tokens + accepted + len(answer)
        method.end(case)
    return tokens * (table[1] + prices[1]) / seconds


def curves(result: str) -> dict[str, CostCurve]:
    """Return each model's cost curve, as `bench.coordgen.speed` measured it for this `result`."""
    models = read("bench.coordgen.speed", result)["models"]
    found = {}
    for name, figures in models.items():
        seconds, heads = (tuple(1e-3 * each for each in figures[key].values()) for key in ("curve_ms", "heads_ms"))
        found[name] = CostCurve(tuple(map(int, figures["curve_ms"])), seconds, filled=True, heads=heads)
    return found


def measured(cases: int, pair: str) -> dict[str, Any]:
    """Return the speed of every drafter on every task of a pair, by cost curve."""
    known = curves("speed" if pair == "home" else f"speed_{pair}")
    found: dict[str, Any] = {name: {} for name in known}
    with Model.load(PAIRS[pair].file("verifier")) as model:
        for task in TASKS[pair]:
            replies = recorded(model, task, cases, pair=pair)
            for name, curve in known.items():
                knowing = Knowing(curve, model)
                found[name][task] = {
                    "ours": speed(replies, curve, Ours(DEFAULT_SOURCES, curve, model)),
                    "all that stands": speed(replies, curve, knowing.ours, knowing),
                    "oracle": speed(replies, curve, Foresight(DraftLengthController(curve))),
                }
    return found


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table: a row for each curve and drafter, a column for each task."""
    names = list(next(iter(found["curves"].values())))
    lines = [f"| curve | drafter | {' | '.join(names)} | share of the oracle's gain |"]
    lines.append("|---|---|" + "---|" * (len(names) + 1))
    for name, tasks in found["curves"].items():
        for way in ("ours", "all that stands", "oracle"):
            gains = [(tasks[task][way] - 1.0) / (tasks[task]["oracle"] - 1.0) for task in names]
            cells = " | ".join(f"{tasks[task][way]:.2f}" for task in names)
            lines.append(f"| {name} | {way} | {cells} | {np.mean(gains):.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=TASKS, default="home")
    parser.add_argument("--cases", type=int, default=40, help="of each task")
    parser.add_argument("--name", default="hindsight", help="of the result file")
    arguments = parser.parse_args()
    found = {
        "pair": arguments.pair, "cases": arguments.cases, "curves": measured(arguments.cases, arguments.pair),
    }  # fmt: skip
    sys.stdout.write(table(found))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.hindsight', found, SEED)}\n")


if __name__ == "__main__":
    main()

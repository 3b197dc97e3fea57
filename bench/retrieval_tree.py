"""Where a tree of copied drafts is faster than a chain: by the price of rows.

    python -m bench.retrieval_tree [--cases 40] [--name ...]

Replies of the bundled verifier are recorded, and copied from with chains and with trees; what a check takes is read off
a cost curve, so nothing is timed and the run can be repeated to the digit. `flat` is a device on which a check of 64
rows takes 1.6 times as long as a single token, as GPUs have it; `bundled` and `0.5b` are curves of the bundled verifier
and of the Qwen2.5-0.5B shape on two cores of a processor, as `bench.attention` measures them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.copying import SEED, TASKS, Ours, Reply, recorded
from bench.report import write
from edgellm.engine import Context, Lens, Model
from edgellm.spec.curve import FLAT, MOST, TWIGS, CostCurve
from edgellm.spec.local import foretell
from edgellm.spec.options import SOURCES
from edgellm.spec.records import GREEDY, Chunk, Expected, Verdict, standing
from edgellm.spec.retrieval.drafter import RetrievalDrafter
from edgellm.store import resolve

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CURVES = {
    "flat": (10.0, 10.1, 10.2, 10.3, 10.5, 10.7, 11.0, 11.5, 12.0, 13.0, 14.0, 16.0),
    "bundled": (0.8, 1.05, 1.1, 1.2, 1.42, 1.7, 2.2, 2.9, 4.2, 5.4, 7.6, 9.6),
    "0.5b": (13.0, 25.0, 29.5, 34.5, 45.0, 55.0, 68.0, 81.0, 116.0, 151.0, 220.0, 290.0),
}
"""Milliseconds of a decode of `ROWS` rows."""


def verdict_on(tree: Chunk, left: Sequence[int]) -> Verdict:
    """Of a verifier that writes `left`."""
    accepted = along(tree.ids.tolist(), left)
    for number, twig in enumerate(tree.twigs):
        if twig.at == accepted < len(left) and int(twig.ids[0]) == left[accepted]:
            accepted += along(twig.ids.tolist(), left[accepted:])
            return Verdict(accepted, np.array(left[accepted : accepted + 1], dtype=np.int32), twig=number)
    return Verdict(accepted, np.array(left[accepted : accepted + 1], dtype=np.int32))


def along(ids: Sequence[int], left: Sequence[int]) -> int:
    """How many of `ids` a verifier accepts that writes `left`."""
    accepted = 0
    while accepted < min(len(ids), len(left)) and ids[accepted] == left[accepted]:
        accepted += 1
    return accepted


def speed(
    model: Model, cases: Sequence[tuple[Reply, list[Expected]]], curve: CostCurve, twigs: int
) -> dict[str, float]:
    """Over plain decoding, tokens a check, and twigs taken."""
    ours, table = Ours(SOURCES, curve, model, twigs=twigs), curve.table()
    seconds = tokens = checks = taken = 0.0
    for case, expected in cases:
        ours.begin(case)
        for some in expected:
            ours.expect(some)
        text, at = np.concatenate((case.prompt, case.reply)).astype(np.int32), len(case.prompt)
        while at < len(text):
            assert isinstance(ours.drafter, RetrievalDrafter)
            tree = ours.drafter.draft(text[:at], min(MOST, len(text) - at), GREEDY)
            verdict = verdict_on(tree, text[at:].tolist())
            took = table[min(ROWS[-1], 1 + len(tree) + sum(len(twig.ids) for twig in tree.twigs))]
            ours.drafter.told(standing(tree, verdict), verdict, took)
            at += verdict.accepted + 1
            seconds, tokens, checks = seconds + took, tokens + verdict.accepted + len(verdict.tokens), checks + 1
            taken += verdict.twig is not None
        ours.end(case)
    return {"speed": tokens * table[1] / seconds, "tokens_a_check": tokens / checks, "twigs": taken}


def measured(cases: int) -> dict[str, Any]:
    """Every curve, every task, with chains and with trees."""
    found: dict[str, Any] = {name: {} for name in CURVES}
    with Model.load(resolve("edgellm-verifier")) as model, Context(model, n_ctx=model.n_ctx_train) as context:
        lens = Lens.open(model)
        for task in TASKS:
            read = []
            for case in recorded(model, task, cases):
                expected: list[Expected] = []
                context.clear()
                foretell(context, case.prompt, 0, expected.append, lens)
                read.append((case, expected))
            for name, milliseconds in CURVES.items():
                curve = CostCurve(ROWS, tuple(1e-3 * each for each in milliseconds))
                found[name][task] = {
                    way: speed(model, read, curve, twigs) for way, twigs in (("chain", 0), ("tree", TWIGS))
                }
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: a row a curve, a column a task: speed with chains, with trees."""
    curves = found["curves"]
    lines = [f"| eight rows | {' | '.join(TASKS)} | tree / chain |", "|---|" + "---|" * (len(TASKS) + 1)]
    for name, tasks in curves.items():
        ratio = float(np.mean([tasks[task]["tree"]["speed"] / tasks[task]["chain"]["speed"] for task in TASKS]))
        cells = (f"{tasks[task]['chain']['speed']:.2f}, {tasks[task]['tree']['speed']:.2f}" for task in TASKS)
        eight = CURVES[name][ROWS.index(8)] / CURVES[name][0]
        lines.append(f"| {name}: {eight:.1f} times one | {' | '.join(cells)} | {ratio:.3f} |")
    return "\n".join([*lines, "", f"(trees are used where eight rows take less than {FLAT} times one)"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="of each task")
    parser.add_argument("--name", default="retrieval_tree", help="of the result file")
    arguments = parser.parse_args()
    found = {"cases": arguments.cases, "curves": measured(arguments.cases)}
    sys.stdout.write(table(found))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.retrieval_tree', found, SEED)}\n")


if __name__ == "__main__":
    main()

"""Measure what each of Synera's two filters is worth by itself, at the same share of verified chunks (Synera, Fig. 16).

    python -m bench.papers.two_filters [--pair home] [--cases 100] [--budgets 0.1 0.2 0.3 0.4 0.6 0.8]

The pair answers held-out cases of all families greedily, in random order. The paper's gate sends a chunk that passes
two filters: it is not confident (P_conf), and later tokens attend to it (P_imp). `confidence` and `importance` are
either filter alone, `synera` is both, and `random` neither. All of them are held to the budget over all replies, so
that they differ in which chunks they send, and not in how many.

Columns: the share that was really verified, the verifier's passes for each token, the mean score over all families in
percent, and the lead of both filters over that gate, with the 95 % half-width of paired differences.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.figures import empty_plot, save_plot
from bench.harness.report import machine, write
from bench.papers.claims import FILTERS
from bench.synera.quality import against, profile_of, remembering
from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.questions import answered, parsed_with_pair, questions, reply_with

BOTH = "synera"
GATES = (BOTH, "confidence", "importance", "random")
BOUNDS = ("never", "always")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all budgets, each in a process of its own, one process for each core at a time."""
    with ProcessPoolExecutor(machine()["cores"], multiprocessing.get_context("spawn")) as pool:
        bounds, *several = pool.map(partial(at_one, arguments), [None, *arguments.budgets])
    budgets = dict(zip(map(str, arguments.budgets), several, strict=True))
    return {"pair": arguments.pair, "cases": arguments.cases, "bounds": bounds, "budgets": budgets}


def at_one(arguments: argparse.Namespace, budget: float | None) -> dict[str, Any]:
    """Return the figures of every gate at one budget, or those of nothing and of everything verified."""
    cases = questions(arguments.cases, pair=arguments.pair)
    names = BOUNDS if budget is None else GATES
    with ExitStack() as closing:
        small, big = (
            closing.enter_context(Model.load(resolve(name))) for name in (arguments.draft, arguments.verifier)
        )
        profile_of(small.path, big.path, arguments.profile)  # a clear word where there is none
        verifier = remembering(big, closing)
        pair = closing.enter_context(LLM(big, draft=small, verifier=verifier, profile=arguments.profile))
        answers = {gate: answered(cases, reply_with(pair, gate=gate, budget=budget)) for gate in names}
    found = {gate: one.figures(cases) for gate, one in answers.items()}
    if BOTH in answers:
        for gate in GATES[1:]:
            found[gate]["both_above"] = against(answers[BOTH], answers[gate], cases)
    return found


def table(found: dict[str, Any]) -> str:
    """Return a line for each gate at each budget, and what the paper says."""
    never, always = (found["bounds"][name]["mean"] for name in BOUNDS)
    lines = [
        f"the {found['pair']} pair: the draft model alone {never:.2f}, the verifier alone {always:.2f}",
        f"budget  {'gate':12}{'share':>7}{'passes':>8}{'mean':>8}  both filters above it",
    ]
    for budget, gates in found["budgets"].items():
        for gate, row in gates.items():
            above = row.get("both_above")
            lead = "" if above is None else f"  {above['mean']:+.2f} ±{above['half_width_95']:.2f}"
            lines.append(
                f"{budget:>6}  {gate:12}{row['share']:7.3f}{row['passes_per_token']:8.3f}{row['mean']:8.2f}{lead}"
            )
    return "\n".join([*lines, FILTERS]) + "\n"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the mean score against the verified share, a line for each gate (Fig. 16)."""
    made = empty_plot(
        f"Either filter alone: the {found['pair']} pair", "share of chunks verified", "mean score of all families, %"
    )
    if made is None:
        return None
    figure, axes = made
    ends = [(0.0, found["bounds"]["never"]["mean"]), (1.0, found["bounds"]["always"]["mean"])]
    for gate in GATES:
        rows = [gates[gate] for gates in found["budgets"].values()]
        points = sorted([*ends, *((row["share"], row["mean"]) for row in rows)])
        axes.plot(*zip(*points, strict=True), "-o" if gate == BOTH else "--.", label=gate)
    return save_plot(figure, axes, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="a family")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.6, 0.8])
    parser.add_argument("--profile", type=Path, help="profile to use in place of the pair's own")
    parser.add_argument("--name", default="two_filters", help="of the result file")
    arguments = parsed_with_pair(parser)
    figures = run(arguments)
    sys.stdout.write(table(figures))
    written = write(arguments.name, "bench.papers.two_filters", figures, HELD_OUT_SEED, plot=plot)
    sys.stdout.write(f"written: {written}\n")


if __name__ == "__main__":
    main()

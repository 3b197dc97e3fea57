"""Measure what each of Synera's two filters is worth by itself, at the same share of verified chunks (Synera, Fig. 16).

The pair answers held-out cases of all families greedily, in random order. The paper's gate sends a chunk that passes
two filters: it is not confident (P_conf), and later tokens attend to it (P_imp). `confidence` and `importance` are
either filter alone, `synera` is both, and `random` neither. All of them are held to the budget over all replies, so
that they differ in which chunks they send, and not in how many.

Columns: the share that was really verified, the verifier's passes for each token, the mean score over all families in
percent, and the lead of both filters over that gate, with the 95 % half-width of paired differences.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures, cores
from bench.papers.claims import FILTERS
from bench.synera.quality import against, profile_of, remembering
from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.storage.model_files import HOME, resolve
from testkit.questions import answered, questions, reply_with

BOTH = "synera"
GATES = (BOTH, "confidence", "importance", "random")
BOUNDS = ("never", "always")


def at_one(count: int, budget: float | None) -> Figures:
    """Return the figures of every gate at one budget, or those of nothing and of everything verified."""
    cases, names = questions(count), BOUNDS if budget is None else GATES
    with ExitStack() as closing:
        small, big = (closing.enter_context(Model.load(resolve(name))) for name in HOME)
        profile_of(small.path, big.path, None)  # a clear word where there is none
        verifier = remembering(big, closing)
        pair = closing.enter_context(LLM(big, draft=small, verifier=verifier))
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
        f"the draft model alone {never:.2f}, the verifier alone {always:.2f}",
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


def measure(
    cases: Annotated[int, "a family"] = 40, budgets: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
) -> Figures:
    """Return the figures of all budgets, each in a process of its own, one process for each core at a time."""
    asked = [None, *budgets]
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        each = pool.map(partial(at_one, cases), asked)
        bounds, *several = track(each, "budgets", len(asked))
    return {"cases": cases, "bounds": bounds, "budgets": dict(zip(map(str, budgets), several, strict=True))}

"""Measure whether a budget of its own for thoughts would pay: verdicts in the working of a reply, or in its result.

    python -m bench.models.thoughts [--cases 300] [--budgets 0.1 0.2 0.4]

No model with real thoughts is at hand, but replies to `quantity` questions are of their kind: first the numbers that
are looked up in the notes, as a working ("Of the eggs, 5 minus 3"), then what follows from them ("makes 2."). The
bundled pair answers held-out questions greedily, with its own profile. With one budget, the fitted gate or a random one
chooses among all chunks. With two budgets there is a gate and a controller for each part, and the budgets are such that
the same share of all chunks is verified: nothing in the working, half as much as with one budget, or as much as there
is.

Columns: shares of chunks that were verified, of the working, of the result and of all; results and whole replies that
are right in percent; and the lead in right results over one budget with the 95 % half-width of paired differences.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.synera.quality import profile_of, remembering
from edgellm.engine import Message, Model
from edgellm.llm import LLM
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import (
    AlwaysGate,
    BudgetController,
    BudgetGate,
    LearnedGate,
    NeverGate,
    RandomGate,
)
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round
from edgellm.storage import resolve
from models.case import Case
from models.home.corpus import HELD_OUT_SEED, held_out
from testkit.questions import MOST

FAMILY = "quantity"
RESULTS = (" makes ", ", so it is over at ")
"""The words between the working and the result."""
GATES = ("auto", "random")
WORKING, RESULT = 0, 1
WAYS = {"nothing": 0.0, "half": 0.5, "all": float("inf")}
"""The budget of the working, in shares of the one budget."""

Open = Callable[[float, BudgetController, int], Gate]
"""Returns the gate of one reply for a budget, a controller and a seed."""


@dataclass
class Part:
    """The decisions on the chunks of one part, of all replies."""

    decided: int = 0
    verified: int = 0

    @property
    def share(self) -> float:
        return self.verified / max(1, self.decided)


class PartGate(Gate):
    """Decides by another gate in the working than in the result, and counts the decisions of each."""

    def __init__(self, model: Model, gates: Sequence[Gate], parts: Sequence[Part]) -> None:
        """Decide with `gates` in the working and in the result, which may be the same; count in `parts`."""
        self._model, self._gates, self._parts = model, gates, parts

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """See `Gate.decide`."""
        written = b"".join(self._model.piece(token) for token in state.ids[state.prompt_tokens :].tolist()).decode()
        at = RESULT if any(words in written for words in RESULTS) else WORKING
        decision = self._gates[at].decide(state, chunk)
        self._parts[at].decided += 1
        self._parts[at].verified += decision.offload
        return decision

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Gate.observe`."""
        for gate in dict.fromkeys(self._gates):
            gate.observe(state, turn)


def result_of(text: str) -> str:
    """Return what follows the working; the whole text where there is no result."""
    return next((text.partition(words)[2] for words in RESULTS if words in text), text)


def opener(gate: str, profile: Profile) -> Open:
    """Return what opens the gates of that name."""

    def opened(budget: float, controller: BudgetController, seed: int) -> Gate:
        if budget <= 0.0:
            return NeverGate()
        if budget >= 1.0:
            return AlwaysGate()
        if gate == "random":
            return BudgetGate(lambda share: RandomGate(share, seed), budget, controller)
        return LearnedGate(profile, budget, controller, seed)

    return opened


def answered(pair: LLM, model: Model, cases: Sequence[Case], gates: Callable[[int], Sequence[Gate]]) -> dict[str, Any]:
    """Answer all questions with the gates of both parts, which `gates` returns for a seed; return what came of it."""
    parts, right, whole = (Part(), Part()), [], []
    for seed, case in enumerate(cases):
        messages = [Message(turn.role, turn.text) for turn in case.prompt]
        gate = PartGate(model, gates(seed), parts)
        reply = pair.reply(messages, max_tokens=MOST, seed=seed, retrieval="off", gate=gate, gamma=2)
        text = "".join(token.piece.decode("utf-8", "replace") for token in reply)
        right.append(result_of(text) == result_of(case.answer))
        whole.append(text == case.answer)
    shares = [part.share for part in parts]
    every = Part(sum(part.decided for part in parts), sum(part.verified for part in parts))
    return {
        "working": shares[WORKING], "result": shares[RESULT], "share": every.share, "chunks": every.decided,
        "of_working": parts[WORKING].decided / every.decided, "right": right, "whole": whole,
    }  # fmt: skip


def ways(
    pair: LLM, model: Model, cases: Sequence[Case], opened: Open, budget: float, of_working: float
) -> dict[str, dict[str, Any]]:
    """Return the answers with one budget, and with two of the same share in all; `of_working` is the share of chunks
    that are in the working."""

    def one(controller: BudgetController) -> Callable[[int], Sequence[Gate]]:
        return lambda seed: (opened(budget, controller, seed),) * 2

    def two(budgets: Sequence[float], controllers: Sequence[BudgetController]) -> Callable[[int], Sequence[Gate]]:
        return lambda seed: [opened(each, kept, seed) for each, kept in zip(budgets, controllers, strict=True)]

    found = {"one": answered(pair, model, cases, one(BudgetController()))}
    for name, times in WAYS.items():
        working = min(times * budget, budget / of_working)
        budgets = working, max(0.0, budget - of_working * working) / (1.0 - of_working)
        found[name] = answered(pair, model, cases, two(budgets, (BudgetController(), BudgetController())))
    return found


def figures_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of each way, in percent, with the lead over one budget."""
    rows = {}
    for name, each in found.items():
        apart = 100.0 * (np.array(each["right"], float) - np.array(found["one"]["right"], float))
        rows[name] = {
            **{key: 100.0 * each[key] for key in ("working", "result", "share")},
            "right": 100.0 * float(np.mean(each["right"])), "whole": 100.0 * float(np.mean(each["whole"])),
            "lead": float(apart.mean()), "half_width_95": float(1.96 * apart.std() / len(apart) ** 0.5),
        }  # fmt: skip
    return rows


def run(count: int, budgets: Sequence[float]) -> dict[str, Any]:
    """Return the figures of both gates at each budget."""
    cases = list(held_out(FAMILY, count, HELD_OUT_SEED))
    with ExitStack() as closing:
        small, big = (
            closing.enter_context(Model.load(resolve(name))) for name in ("edgellm-draft", "edgellm-verifier")
        )
        profile = profile_of(small.path, big.path, None)
        pair = closing.enter_context(LLM(big, draft=small, verifier=remembering(big, closing), threads=1))
        bounds = {
            name: answered(pair, small, cases, lambda _seed, gate=gate: (gate, gate))  # type: ignore[misc]
            for name, gate in (("never", NeverGate()), ("always", AlwaysGate()))
        }
        of_working = bounds["always"]["of_working"]
        figures: dict[str, Any] = {
            "cases": count, "of_working": 100.0 * of_working,
            **{name: 100.0 * float(np.mean(each["right"])) for name, each in bounds.items()}, "gates": {},
        }  # fmt: skip
        for gate in GATES:
            opened = opener(gate, profile)
            figures["gates"][gate] = {
                str(budget): figures_of(ways(pair, small, cases, opened, budget, of_working)) for budget in budgets
            }
            sys.stderr.write(table(figures))
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """Return a line for each way to spend a budget."""
    lines = [
        f"{figures['cases']} questions; {figures['of_working']:.0f} % of the chunks are working.",
        f"Results right: {figures['never']:.1f} % with nothing verified, {figures['always']:.1f} % with everything.",
        "gate    budget  in the working  working  result     all   right   whole            lead",
    ]
    for gate, budgets in figures["gates"].items():
        for budget, rows in budgets.items():
            for name, row in rows.items():
                lead = "" if name == "one" else f"{row['lead']:+8.1f} ±{row['half_width_95']:.1f}"
                lines.append(
                    f"{gate:8}{float(budget):6.1f}  {'one budget' if name == 'one' else name:14}"
                    f"{row['working']:8.1f}%{row['result']:7.1f}%{row['share']:7.1f}%{row['right']:7.1f}%"
                    f"{row['whole']:7.1f}%  {lead}".rstrip()
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--name", default="thoughts", help="of the result file")
    arguments = parser.parse_args()
    figures = run(arguments.cases, arguments.budgets)
    path: Path = write(arguments.name, "bench.models.thoughts", figures, HELD_OUT_SEED)
    sys.stdout.write(f"{table(figures)}written: {path}\n")


if __name__ == "__main__":
    main()

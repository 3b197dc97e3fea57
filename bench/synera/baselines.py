"""Two baselines of Synera (section 6.1), under a budget, with the pair's own models and profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np

from edgellm.llm import LLM
from edgellm.spec.gates.fitting import perplexity
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController, BudgetGate, Rule, TailGate
from edgellm.spec.types import Chunk, Decision
from testkit.questions import MOST, Answers, Question

_STEPS = 64  # thresholds between a share of 0 and of 1


class HybridGate(Rule):
    """Hybrid SLM and LLM inference (Hao et al. 2024): each token below a confidence threshold is offloaded.

    It decides token by token, so its chunks have one token.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def judge(self, chunk: Chunk, place: int) -> Decision:  # noqa: ARG002
        least = float(chunk.confidence.min())
        return Decision(least < self._threshold, f"confidence {least:.2f} against {self._threshold:.2f}")


def hybrid_gate(profile: Profile, budget: float, controller: BudgetController) -> BudgetGate:
    """Return the gate whose threshold follows `controller`, so that the share of offloaded tokens stays the budget."""

    @lru_cache(maxsize=_STEPS + 1)
    def at(step: int) -> Rule:
        return HybridGate(float(np.quantile(profile.tokens, step / _STEPS)))

    return BudgetGate(lambda share: at(round(share * _STEPS)), budget, controller)


def hybrid(pair: LLM, profile: Profile, budget: float, cases: Sequence[Question]) -> Answers:
    """Answer all questions by the hybrid gate, under a budget of tokens."""
    answers, controller = Answers(), BudgetController()
    gate = TailGate(hybrid_gate(profile, budget, controller), controller)
    for seed, question in enumerate(cases):
        answers.add(
            question, pair.reply(question.messages, max_tokens=MOST, seed=seed, retrieval="off", gamma=1, gate=gate)
        )
    answers.share = controller.share
    return answers


def edgefm(pair: LLM, alone: LLM, profile: Profile, budget: float, cases: Sequence[Question]) -> Answers:
    """Answer all questions by EdgeFM (Yang et al. 2023), under a budget of replies.

    The draft model of `pair` writes the whole reply. If its perplexity is above a threshold that follows the budget,
    the verifier `alone` writes it again.
    """
    answers, controller = Answers(), BudgetController()
    for seed, question in enumerate(cases):
        reply = pair.reply(question.messages, max_tokens=MOST, seed=seed, retrieval="off", gate="never")
        surprise = perplexity([token.confidence or 1.0 for token in reply])
        aim = controller.target_share(budget)
        above = float(np.quantile(profile.perplexities, 1.0 - aim)) if 0.0 < aim < 1.0 else inf if aim <= 0.0 else -inf
        controller.record(surprise > above)
        if surprise > above:
            reply = alone.reply(question.messages, max_tokens=MOST, seed=seed, retrieval="off")
        answers.add(question, reply)
    answers.share = controller.share
    return answers

"""Two baselines of Synera (section 6.1), under a budget, with the pair's own models and profile."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from edgellm.llm import LLM
from edgellm.spec.gates.fitting import perplexity
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController, BudgetGate, Rule, judge_at
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Decision
from testkit.questions import Answers, Question, answered, reply_with

_STEPS = 64  # thresholds between a share of 0 and of 1


class HybridGate(BudgetGate):
    """Hybrid SLM and LLM inference (Hao et al. 2024): each token below a confidence threshold is offloaded, which
    follows the controller, so that the share of offloaded tokens stays the budget.

    It decides token by token, so its chunks have one token.
    """

    def __init__(self, profile: Profile, budget: float, controller: BudgetController) -> None:
        @lru_cache(maxsize=_STEPS + 1)
        def at(step: int) -> Rule:
            threshold = float(np.quantile(profile.alone.tokens, step / _STEPS))
            return Rule(lambda confidence, _: np.where(confidence < threshold, 1.0, 0.0))

        super().__init__(judge_at(lambda share: at(round(share * _STEPS)), controller), budget, controller)
        self._counted = controller

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        decision = super().decide(state, chunk)
        self._counted.record(decision.offload)
        return decision


def hybrid_options(profile: Profile, budget: float, controller: BudgetController) -> dict[str, Any]:
    """Return the options of a reply by the hybrid gate; `controller` keeps the budget of tokens over all replies."""
    return {"gamma": 1, "gate": HybridGate(profile, budget, controller)}


def hybrid(pair: LLM, profile: Profile, budget: float, cases: Sequence[Question]) -> Answers:
    """Answer all questions by the hybrid gate, under a budget of tokens."""
    controller = BudgetController()
    answers = answered(cases, reply_with(pair, **hybrid_options(profile, budget, controller)))
    answers.share = controller.share
    return answers


class ReplyRule:
    """EdgeFM's rule (Yang et al. 2023), under a budget of replies.

    The draft model writes the whole reply. If its perplexity is above a threshold that follows the budget, the verifier
    writes it again.
    """

    def __init__(self, profile: Profile, budget: float, controller: BudgetController) -> None:
        self._perplexities, self._budget, self._controller = profile.alone.perplexities, budget, controller

    def rewrites(self, confidences: Sequence[float | None]) -> bool:
        """Return whether the verifier writes a reply again whose tokens had these confidences."""
        aim = self._controller.target_share(self._budget)
        above = float(np.quantile(self._perplexities, 1.0 - aim)) if 0.0 < aim < 1.0 else inf if aim <= 0.0 else -inf
        rewritten = perplexity([confidence or 1.0 for confidence in confidences]) > above
        self._controller.record(rewritten)
        return rewritten


def edgefm(pair: LLM, alone: LLM, profile: Profile, budget: float, cases: Sequence[Question]) -> Answers:
    """Answer all questions by EdgeFM's rule, with the draft model of `pair` and the verifier `alone`."""
    answers, controller = Answers(), BudgetController()
    rule = ReplyRule(profile, budget, controller)
    draft, again = reply_with(pair, gate="never"), reply_with(alone)
    for seed, question in enumerate(cases):
        reply = draft(question, seed)
        if rule.rewrites([token.confidence for token in reply]):
            reply = again(question, seed)
        answers.add(question, reply)
    answers.share = controller.share
    return answers

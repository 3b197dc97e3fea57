"""Gates, which decide whether a chunk is verified, and the controller of their budget."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.profile import FittedJudge, Profile, draw
from edgellm.spec.params import CHUNK, GATES, ReplyOptions
from edgellm.spec.protocols import Gate, GenerationState
from edgellm.spec.types import Chunk, Decision

Numbers = npt.NDArray[np.float64]

HORIZON = 48
"""Minimum number of decisions over which a deficit is corrected: a few replies. Later an eighth of all decisions, so
that verdicts are not spent or saved only to be even."""

VERIFIED_SHARE = 0.8
"""Share of `max_tokens` within which a budgeted gate verifies."""

_ALWAYS = Decision(True, "this gate verifies everything")
_NEVER = Decision(False, "this gate verifies nothing")


class AlwaysGate(Gate):
    """A gate that verifies every chunk: the reply is the verifier's."""

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return _ALWAYS


class NeverGate(Gate):
    """A gate that verifies no chunk: the reply is the draft model's (the paper's edge-centric baseline)."""

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return _NEVER


Chances: TypeAlias = Callable[[Numbers, Numbers], Numbers]
"""A function from the mean confidence and importance of chunks, (n,) each, to their chances to be verified, (n,)."""


class Rule(Gate):
    """A gate that verifies a chunk with a chance by its mean confidence and importance. The draw depends on the seed
    and on the place in the reply alone, so that a run can be repeated."""

    def __init__(self, chances: Chances, seed: int = 0, usual_importance: float = 0.0) -> None:
        """Draw by `seed`; chunks drafted ahead, which have no measured importance, have the usual one."""
        self.chances, self._seed, self._usual_importance = chances, seed, usual_importance

    def judge(self, chunk: Chunk, place: int) -> Decision:
        """Return the decision on `chunk`; its draw depends on the seed and `place`."""
        confidence = float(chunk.confidence.sum()) / len(chunk)
        importance = self._usual_importance if chunk.importance is None else chunk.importance
        chance = float(self.chances(np.float64(confidence), np.float64(importance)))  # type: ignore[arg-type]
        drawn = draw(self._seed, place)
        seen = f"confidence {confidence:.2f}, importance {importance:.2f}"
        return Decision(drawn < chance, f"{seen}: verified with a chance of {chance:.2f}, and drew {drawn:.2f}")

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        return self.judge(chunk, state.written)


def at_random(_profile: Profile | None, share: float) -> Chances:
    """Return the rule of equal chances."""
    return lambda confidence, _: np.full(np.shape(confidence), share)


def by_confidence(profile: Profile, share: float) -> Chances:
    """Return Synera's coarse filter (section 4.2), which verifies this share, in (0, 1), of chunks like the profiled
    ones: confident chunks stay here, the others go with probability P_conf."""
    known = np.array(profile.alone.confidence)
    c_th = 1.0 - solve(lambda doubt: float(p_conf(known, 1.0 - doubt).mean()), share, 0.0, 1.0)
    return lambda confidence, _: p_conf(confidence, c_th)


@dataclass(slots=True)
class BudgetController:
    """The decisions made under a budget so far, over all replies of a pair, and the controller's state.

    `integral` corrects a lasting bias: profiled scores that no longer fit make a gate offload always too much or too
    little, which the proportional part alone would leave as a standing error.
    """

    decided: int = 0
    offloaded: int = 0
    integral: float = 0.0

    @property
    def share(self) -> float | None:
        """Return the share of chunks offloaded so far, None before the first decision."""
        return self.offloaded / self.decided if self.decided else None

    def record(self, offload: bool) -> None:
        self.decided += 1
        self.offloaded += offload

    def target_share(self, budget: float) -> float:
        """Return the share to offload now, in [0, 1]: the budget, corrected by the deficit so far. Call it once per
        decision.

        A proportional-integral controller, critically damped if the gate's share follows its target.
        """
        if budget in (0.0, 1.0):
            return budget
        deficit = budget * self.decided - self.offloaded
        horizon = max(HORIZON, self.decided // 8)
        target = budget + deficit / horizon + self.integral
        if 0.0 < target < 1.0 or (target <= 0.0) == (deficit > 0.0):  # anti-windup
            self.integral += deficit / (4 * horizon**2)
        return min(1.0, max(0.0, target))


Judge: TypeAlias = Callable[[GenerationState, Chunk, float], Decision]
"""A function that decides on a chunk, so that this share of all chunks is verified."""


def judge_at(at: Callable[[float], Rule], controller: BudgetController) -> Judge:
    """Return a judge by the rules `at` shares in (0, 1). Draws are keyed by the pair's decision count in `controller`:
    by its place in the reply, a seed would draw the same in all replies."""

    def judge(state: GenerationState, chunk: Chunk, target: float) -> Decision:  # noqa: ARG001
        if 0.0 < target < 1.0:
            return at(target).judge(chunk, controller.decided)
        return Decision(target >= 1.0, "the budget is underspent" if target else "the budget is overspent")

    return judge


class BudgetGate(Gate):
    """A gate that keeps a budget over all chunks, the unverified tail of each reply included: nothing is verified
    beyond `VERIFIED_SHARE` of `max_tokens`, the sequence-wise early exit (Synera, 4.3)."""

    def __init__(self, judge: Judge, budget: float, controller: BudgetController, layers: tuple[int, ...] = ()) -> None:
        """Share `controller` with all replies of the pair: the budget holds over all of them."""
        self._judge, self._budget, self._controller, self.layers = judge, budget, controller, layers

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        written, most = state.answered, state.limits.max_tokens
        if written >= VERIFIED_SHARE * most:
            return Decision(False, f"{written} of at most {most} tokens are written; the rest is not verified")
        return self._judge(state, chunk, self._controller.target_share(self._budget))


def p_conf(c: float | Numbers, c_th: float) -> Numbers:
    """Return P_conf (Synera section 4.2): the probability that a chunk of mean confidence `c` is verified."""
    if c_th >= 1.0:
        return np.ones(np.shape(c))
    chances = 1.0 / (1.0 + np.exp(10.0 * (np.maximum(c - c_th, 0.0) / (1.0 - c_th) - 0.5)))
    return np.where(c <= c_th, 1.0, chances)


def solve(share_at: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """Return the x in [low, high] where `share_at`, which never rises with x, comes down to `budget`; by bisection.

    Return `low` where even that offers no more than the budget, `high` where every x offers more.
    """
    if share_at(low) <= budget:
        return low
    if share_at(high) > budget:
        return high
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share_at(middle) > budget else (low, middle)
    return high


DOUBT = 0.5
"""Below this confidence a token is more likely wrong than right, and drafts after it are wasted. A device that waits
for its verifier should ask at once; otherwise a verdict on a whole chunk is worth more."""


@dataclass(frozen=True, slots=True)
class GateChoice:
    """A gate with its settings for a reply.

    `gamma` is the length of a chunk; `controller` keeps a budget. A chunk ends after a token with a confidence below
    `stop_below`. Below `lookup_below`, the context's token is drafted instead.
    """

    gate: Gate
    reason: str
    gamma: int
    controller: BudgetController | None = None
    stop_below: float = 0.0
    lookup_below: float = 0.0


def choose(
    options: ReplyOptions, seed: int, *, profile: Profile | None, controller: BudgetController, linked: bool = False
) -> GateChoice:
    """Return the requested gate. Its draws come from `seed`, and `controller` keeps its budget.

    `profile` is required if the options need one. `linked`: the verifier is across a link, so the device waits for it.
    """
    gate, budget, gamma = options.gate, options.budget, options.gamma or CHUNK
    if not isinstance(gate, str):
        return GateChoice(gate, "a custom gate", gamma, controller)
    if budget is None and (budget := GATES[gate].stands_for) is None:
        return GateChoice(AlwaysGate(), "no budget is given, so everything is verified", gamma, controller)
    if budget == 0.0:
        return GateChoice(NeverGate(), "nothing is verified, as requested", gamma)
    if budget == 1.0:
        return GateChoice(AlwaysGate(), "everything is verified, as requested", gamma, controller)
    if profile is not None:
        gamma = options.gamma or profile.terms.gamma
    if gate != "auto" or profile is None:
        judge = judge_at(_rule_at_share(gate, profile, seed), controller)
        layers = profile.terms.layers if profile is not None and GATES[gate].importance else ()
        keeps = BudgetGate(judge, budget, controller, layers)
        return GateChoice(keeps, f"the {gate} gate, as requested", gamma, controller)
    reason, lookup_below = evidence_of(profile, budget), profile.hesitates if options.context_lookup else 0.0
    if lookup_below > 0.0:
        reason += f"; below a confidence of {lookup_below:.2f} the context's token is drafted"
    return GateChoice(
        BudgetGate(FittedJudge(profile, budget, seed), budget, controller), reason, gamma, controller,
        stop_below=DOUBT if linked else 0.0, lookup_below=lookup_below,
    )  # fmt: skip


def evidence_of(profile: Profile, budget: float) -> str:
    """Return what the fitted gate has brought in the profile, at the budget nearest to this one."""
    share = min((policy.share for policy in profile.policies), key=lambda known: abs(known - budget))
    right = profile.evidence.get(f"gate worth at {share}", 0.0)
    chosen = f"with {share:.0%} of chunks verified, {right:.0%} of the profiled replies equal the verifier's"
    return f"the fitted gate: {chosen}"


def _rule_at_share(gate: str, profile: Profile | None, seed: int) -> Callable[[float], Rule]:
    """Return a function from a share of chunks to the rule of the gate of that name which offloads it."""
    module, _, name = GATES[gate].chances.partition(":")
    chances, usual = getattr(import_module(module), name), 0.0 if profile is None else profile.usual_importance

    @cache
    def at(percent: int) -> Rule:
        return Rule(chances(profile, percent / 100), seed, usual)

    return lambda share: at(min(99, max(1, round(100 * share))))

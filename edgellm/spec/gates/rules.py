"""The paper's gates, which decide whether a chunk is verified, and their budget's controller."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgellm.errors import InvalidOption
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round

_Numbers = npt.NDArray[np.float64]

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


class Rule(Gate):
    """A gate that decides by the chunk and its place alone, so that a run can be repeated."""

    @abstractmethod
    def judge(self, chunk: Chunk, place: int) -> Decision:
        """Return the decision on `chunk`; its random draw depends on the seed and `place`."""

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """Return the decision on `chunk` at its place in the reply."""
        return self.judge(chunk, state.written)


class RandomGate(Rule):
    """A gate that offloads any chunk with the budget as its chance."""

    def __init__(self, budget: float, seed: int = 0) -> None:
        self._budget, self._seed = checked_share(budget, "budget"), seed

    def judge(self, chunk: Chunk, place: int) -> Decision:  # noqa: ARG002
        number = draws(self._seed, place)[0]
        return Decision(number < self._budget, f"verified with a chance of {self._budget:.2f}: drew {number:.2f}")


class ConfidenceGate(Rule):
    """Synera's coarse filter (section 4.2): confident chunks stay here, the others go with probability P_conf.

    The draw depends on the seed and on the place in the reply alone, so a run can be repeated.
    """

    def __init__(self, c_th: float, seed: int = 0) -> None:
        """Always verify a chunk whose mean confidence is not above `c_th`, in [0, 1].

        Raises:
            InvalidOption: `c_th` is not in [0, 1].
        """
        self._c_th, self._seed = checked_share(c_th, "confidence threshold"), seed

    def judge(self, chunk: Chunk, place: int) -> Decision:
        confidence = float(chunk.confidence.sum()) / len(chunk)
        chance = float(p_conf(confidence, self._c_th))
        if chance >= 1.0:
            return Decision(True, f"confidence {confidence:.2f} is not above {self._c_th:.2f}")
        number = draws(self._seed, place)[0]
        return Decision(
            number < chance,
            f"confidence {confidence:.2f}, so verified with a chance of {chance:.2f}: drew {number:.2f}",
        )


class ImportanceGate(Rule):
    """Synera's fine filter alone (section 4.2): chunks that later tokens attend to go with probability P_imp."""

    def __init__(self, i_th: float, seed: int = 0, usual_importance: float = 0.0) -> None:
        """Always offload a chunk whose mean importance is above `i_th`, and none at or below half of `i_th`.
        `usual_importance` is used for chunks drafted ahead, which have no measured importance."""
        self._i_th, self._seed, self._usual_importance = i_th, seed, usual_importance

    def judge(self, chunk: Chunk, place: int) -> Decision:
        measured = chunk.importance[chunk.ahead :]
        importance = float(measured.sum()) / len(measured) if len(measured) else self._usual_importance
        chance = float(p_imp(importance, self._i_th))
        number = draws(self._seed, place)[1]
        return Decision(
            number < chance,
            f"importance {importance:.2f}, so verified with a chance of {chance:.2f}: drew {number:.2f}",
        )


class SyneraGate(Rule):
    """The paper's gate (Synera, section 4.2): a chunk is offloaded if draws from P_conf and then from P_imp both
    succeed."""

    def __init__(self, c_th: float, i_th: float, seed: int = 0, usual_importance: float = 0.0) -> None:
        """Take `c_th` as for `ConfidenceGate`, the others as for `ImportanceGate`."""
        self._coarse, self._fine = ConfidenceGate(c_th, seed), ImportanceGate(i_th, seed, usual_importance)

    def judge(self, chunk: Chunk, place: int) -> Decision:
        coarse = self._coarse.judge(chunk, place)
        if not coarse.offload:
            return coarse
        fine = self._fine.judge(chunk, place)
        return Decision(fine.offload, f"{coarse.reason}; {fine.reason}")


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


class BudgetGate(Gate):
    """A gate with one parameter, adjusted with every chunk so that the offloaded share stays at the budget."""

    def __init__(self, at: Callable[[float], Rule], budget: float, controller: BudgetController) -> None:
        """Keep `budget`; `at` returns the gate that offloads a share in (0, 1) of chunks like the profiled ones."""
        self._at, self._budget, self._controller = at, budget, controller

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        target = self._controller.target_share(self._budget)
        if 0.0 < target < 1.0:
            # Draws are keyed by the pair's decision count, else a seed would draw the same in all replies.
            decision = self._at(target).judge(chunk, self._controller.decided)
        else:
            decision = Decision(target >= 1.0, "the budget is underspent" if target else "the budget is overspent")
        self._controller.record(decision.offload)
        return decision


class TailGate(Gate):
    """Sequence-wise early exit (Synera, 4.3): beyond `VERIFIED_SHARE` of `max_tokens` nothing is verified any more."""

    def __init__(self, gate: Gate, controller: BudgetController) -> None:
        """Wrap `gate`; its `controller` counts these chunks too, as its budget is a share of all."""
        self._gate, self._controller = gate, controller

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        written, max_tokens = state.answered, state.limits.max_tokens
        if written >= VERIFIED_SHARE * max_tokens:
            self._controller.record(False)
            return Decision(False, f"{written} of at most {max_tokens} tokens are written; the rest is not verified")
        return self._gate.decide(state, chunk)

    def observe(self, state: GenerationState, turn: Round) -> None:
        self._gate.observe(state, turn)


class CountingGate(Gate):
    """A counter of the decisions of a gate without controller."""

    def __init__(self, gate: Gate, controller: BudgetController) -> None:
        self._gate, self._controller = gate, controller

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        decision = self._gate.decide(state, chunk)
        self._controller.record(decision.offload)
        return decision

    def observe(self, state: GenerationState, turn: Round) -> None:
        self._gate.observe(state, turn)


def p_conf(c: float | _Numbers, c_th: float) -> _Numbers:
    """Return P_conf (Synera section 4.2): the probability that a chunk of mean confidence `c` is verified."""
    if c_th >= 1.0:
        return np.ones(np.shape(c))
    chances = 1.0 / (1.0 + np.exp(10.0 * (np.maximum(c - c_th, 0.0) / (1.0 - c_th) - 0.5)))
    return np.where(c <= c_th, 1.0, chances)


def p_imp(i: float | _Numbers, i_th: float) -> _Numbers:
    """Return P_imp (Synera section 4.2): the probability that a chunk of mean importance `i` is verified."""
    half = max(i_th / 2.0, 1e-12)
    chances = 1.0 / (1.0 + np.exp(-10.0 * (np.clip((i - half) / half, 0.0, 1.0) - 0.5)))
    return np.where(i > i_th, 1.0, np.where(i <= half, 0.0, chances))


def checked_share(value: float, name: str) -> float:
    """Return `value` if it is in [0, 1].

    Raises:
        InvalidOption: it is not.
    """
    if not 0.0 <= value <= 1.0:
        raise InvalidOption(f"The {name} {value} is not in [0, 1].", "Give one such as 0.8.")
    return value


def draws(seed: int, place: int) -> tuple[float, float, float]:
    """Return the random numbers in [0, 1) of this place: for the coarse and the fine filter, and for ties."""
    numbers = np.random.Generator(np.random.Philox(key=seed & 2**64 - 1, counter=place))
    coarse, fine, tie = numbers.random(3).tolist()
    return coarse, fine, tie

"""The fitted gate, which spends a budget on the chunks whose verification is worth most by the pair's profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.offload_policy import signals, surprise
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController, draws
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision

Scores = npt.NDArray[np.float64]


class Threshold:
    """A threshold of scores (higher is better to verify), whose realised share is the budget.

    The threshold is a quantile of the profiled scores. Scores drift, because unverified replies diverge from verified
    ones, so the quantile follows the controller's target share.
    """

    def __init__(self, profiled: Scores | Sequence[float], budget: float, controller: BudgetController) -> None:
        """Start from `profiled` (n,), n at least 1: scores of chunks from profiling, in any order."""
        self._sorted = np.sort(np.asarray(profiled, dtype=np.float64))
        self._budget = budget
        self.controller = controller

    def decide(self, score: float, tie: float) -> tuple[bool, str]:
        """Return whether a chunk of `score` is offloaded, and why. `tie` in [0, 1) ranks equal scores."""
        target = self.controller.target_share(self._budget)
        n = len(self._sorted)
        below, up_to = (int(self._sorted.searchsorted(score, side)) for side in ("left", "right"))
        # Rank among the profiled scores and itself, 0 the highest; ties in random order.
        place = (n - up_to + tie * (up_to - below + 1)) / (n + 1)
        offload = place < target
        self.controller.record(offload)
        return (
            offload,
            f"score {score:.3g}, above {below / n:.0%} of the profiled chunks; {target:.0%} are to be verified",
        )


class LearnedGate(Gate):
    """A gate that offloads the chunks of highest value (`offload_policy.py`) within the budget, for one reply."""

    def __init__(self, profile: Profile, budget: float, controller: BudgetController, seed: int = 0) -> None:
        """Share `controller` with all replies of the pair: the budget holds over all of them."""
        self._policy = profile.policy(budget)
        self._threshold = Threshold(self._policy.scores, budget, controller)
        self._seed, self._usual_importance = seed, profile.usual_importance
        self._prompt_difficulty = profile.difficulty
        self._difficulty: float | None = None  # difficulty of this reply's prompt
        self._so_far = 0.0
        self._p_correct = 1.0  # probability that the reply so far equals the verifier's

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        written = state.written
        tie = draws(self._seed, written)[2]
        if self._difficulty is None:
            self._difficulty = self._prompt_difficulty.of(state.ids[: state.prompt_tokens])
        features = signals(chunk, written, self._usual_importance, self._so_far, self._difficulty)
        p_rejected, continuation = self._policy.judge(features)
        offload, reason = self._threshold.decide(self._p_correct * p_rejected * continuation, tie)
        why = f"{p_rejected:.0%} chance of rejection, {self._p_correct:.0%} that the reply is correct so far: {reason}"
        self._so_far += surprise(chunk)
        if not offload:
            self._p_correct *= 1.0 - p_rejected
        return Decision(offload, why)

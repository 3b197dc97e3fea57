"""The fitted gate, which spends a budget on the chunks whose verification is worth most by the pair's profile."""

from __future__ import annotations

import numpy as np

from edgellm.spec.gates.offload_policy import signals, surprise, with_chance
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController, draw
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision


class LearnedGate(Gate):
    """A gate that offloads the chunks of highest value (`offload_policy.py`) within the budget, for one reply.

    A chunk is offloaded if its value is above a quantile of the profiled values. Values drift, because unverified
    replies diverge from verified ones, so the quantile follows the controller's target share.
    """

    def __init__(self, profile: Profile, budget: float, controller: BudgetController, seed: int = 0) -> None:
        """Share `controller` with all replies of the pair: the budget holds over all of them."""
        self._profile, self._budget, self._controller, self._seed = profile, budget, controller, seed
        self._policy = min(profile.policies, key=lambda policy: abs(policy.share - budget))
        self._sorted = np.sort(np.array(self._policy.scores))
        self._difficulty: float | None = None  # difficulty of this reply's prompt
        self._so_far = 0.0
        self._p_correct = 1.0  # probability that the reply so far equals the verifier's

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        if self._difficulty is None:
            self._difficulty = self._profile.difficulty_of(state.ids[: state.prompt_tokens])
        seen = signals(chunk, state.written, self._so_far, self._difficulty)[None]
        rejected = self._profile.rejected.scores(seen)
        p_rejected = float(rejected[0])
        continuation = float(self._policy.continuation.scores(with_chance(seen, rejected))[0])
        value = self._p_correct * p_rejected * continuation
        target = self._controller.target_share(self._budget)
        below, place = self._rank(value, draw(self._seed, state.written))
        why = (
            f"{p_rejected:.0%} chance of rejection, {self._p_correct:.0%} that the reply is correct so far: score"
            f" {value:.3g}, above {below:.0%} of the profiled chunks; {target:.0%} are to be verified"
        )
        self._so_far += surprise(chunk)
        if place >= target:
            self._p_correct *= 1.0 - p_rejected
        return Decision(place < target, why)

    def _rank(self, value: float, tie: float) -> tuple[float, float]:
        """Return the share of profiled values below one, and its rank among them and itself: 0 is the highest, and 1
        the end. `tie` in [0, 1) ranks equal values."""
        n = len(self._sorted)
        below, up_to = (int(self._sorted.searchsorted(value, side)) for side in ("left", "right"))
        return below / n, (n - up_to + tie * (up_to - below + 1)) / (n + 1)

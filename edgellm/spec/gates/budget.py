"""The budget controller: keeps the share of offloaded chunks at the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HORIZON = 48
"""Minimum number of decisions over which a deficit is corrected: a few replies. Later an eighth of all decisions so
far, so that verdicts are not spent or saved only to be even."""

Scores = npt.NDArray[np.float64]


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


class Threshold:
    """Turns scores (higher is better to verify) into decisions whose realised share is the budget.

    The threshold is a quantile of the profiled scores. Those drift, because unverified replies diverge from verified
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
        # its rank among the profiled scores and itself, 0 the highest; ties in random order
        place = (n - up_to + tie * (up_to - below + 1)) / (n + 1)
        offload = place < target
        self.controller.record(offload)
        return (
            offload,
            f"score {score:.3g}, above {below / n:.0%} of the profiled chunks; {target:.0%} are to be verified",
        )


def solve(share_at: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """Return the x in [low, high] where `share_at`, which never rises with x, comes down to `budget`; by bisection.

    Return `low` where even that offers no more than the budget, `high` where every x offers more.
    """
    if share_at(low) <= budget:
        return low
    if share_at(high) > budget:
        return high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share_at(middle) > budget else (low, middle)
    return high

"""The budget as one dial: the share of chunks that is really offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HORIZON = 48
"""Decisions over which what the budget owes is paid back at least: some replies' worth. Later as many as an eighth of
those made so far: the share is kept all the same, and a verdict is not spent, or spared, only to be even."""

Scores = npt.NDArray[np.float64]


@dataclass(slots=True)
class BudgetController:
    """The decisions that a budget has been spent on so far, over all replies of a pair.

    `lean` is how much more than the budget must be aimed at to reach it: profiled scores that no longer fit make a gate
    offload always too much or too little, which paying back alone would leave standing as a debt.
    """

    decided: int = 0
    offloaded: int = 0
    lean: float = 0.0

    @property
    def share(self) -> float | None:
        """Return the share of chunks offloaded so far, None before the first decision."""
        return self.offloaded / self.decided if self.decided else None

    def enter(self, offload: bool) -> None:
        self.decided += 1
        self.offloaded += offload

    def aim(self, budget: float) -> float:
        """Return the share to offload now, in [0, 1]: the budget, corrected by what it owes so far. Call it once per
        decision.

        A proportional-integral controller, critically damped where the share that a gate offloads follows its aim.
        """
        if budget in (0.0, 1.0):
            return budget
        owed = budget * self.decided - self.offloaded
        horizon = max(HORIZON, self.decided // 8)
        aim = budget + owed / horizon + self.lean
        if 0.0 < aim < 1.0 or (aim <= 0.0) == (owed > 0.0):  # at its end it leans no further
            self.lean += owed / (4 * horizon**2)
        return min(1.0, max(0.0, aim))


class Threshold:
    """Turns scores (higher: worth more) into decisions whose realised share is the budget.

    The threshold is a quantile of the scores seen in profiling. Those drift, because replies that are not verified
    wander where verified ones do not: so the quantile is that of the share which the ledger says is due now.
    """

    def __init__(self, profiled: Scores | Sequence[float], budget: float, ledger: BudgetController) -> None:
        """Start from `profiled` (n,), n at least 1: scores of chunks from profiling, in any order."""
        self._sorted = np.sort(np.asarray(profiled, dtype=np.float64))
        self._budget = budget
        self.ledger = ledger

    def decide(self, score: float, tie: float) -> tuple[bool, str]:
        """Return whether a chunk of `score` is offloaded, and why. `tie` in [0, 1) ranks equal scores."""
        aim = self.ledger.aim(self._budget)
        n = len(self._sorted)
        below, upto = (int(self._sorted.searchsorted(score, side)) for side in ("left", "right"))
        # its place among the profiled ones and itself, 0 the highest; equal scores are in random order
        place = (n - upto + tie * (upto - below + 1)) / (n + 1)
        offload = place < aim
        self.ledger.enter(offload)
        return offload, f"worth {score:.3g}, as much as {below / n:.0%} of profiled chunks or more; {aim:.0%} are due"


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

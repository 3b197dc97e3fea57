"""U(t) = a(1 - e^(-bt)), equation 8, from measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.problem import Floats
from edgellm.errors import InvalidOption

_GRID = 400
_LEAST, _MOST = 1e-4, 5.0  # b: from a device that is at its best at some 10,000 tokens to one that is at 1 already


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The curve c(t) = peak (1 - e^(-bt)). `peak`, in FLOP/s, is the product of c* and `a` in equations 8 and 9, which
    speeds alone cannot tell apart; `worst` is the largest distance of a measured speed from the curve, as a share."""

    peak: float
    b: float
    worst: float

    def speed(self, tokens: float) -> float:
        """Return the FLOP/s of a pass over `tokens` tokens."""
        return float(self.peak * -np.expm1(-self.b * tokens))


def fit_utilisation(tokens: Sequence[int], speeds: Sequence[float]) -> Utilisation:
    """Return the curve with the least sum of squared relative errors. For each b of a fine grid the best peak is known:
    with g = 1 - e^(-bt), it is sum(g/c) / sum(g²/c²).

    Raises:
        InvalidOption: there are no speeds, or some are not positive numbers.
    """
    t, c = np.asarray(tokens, dtype=float), np.asarray(speeds, dtype=float)
    if not len(t) or t.shape != c.shape or not (np.isfinite(c).all() and (c > 0.0).all() and (t > 0.0).all()):
        raise InvalidOption(f"The speeds {list(speeds)} were measured at {list(tokens)} tokens.", "Measure again.")
    low, high = np.log(_LEAST), np.log(_MOST)
    for _ in range(3):  # each time around the best of the last
        grid = np.exp(np.linspace(low, high, _GRID))
        best = int(np.argmin(_errors(grid, t, c)))
        step = (high - low) / (_GRID - 1)
        low, high = np.log(grid[best]) - step, np.log(grid[best]) + step
    b = float(grid[best])
    g = -np.expm1(-b * t)
    peak = float((g / c).sum() / ((g / c) ** 2).sum())
    return Utilisation(peak, b, float(np.abs(peak * g / c - 1.0).max()))


def _errors(grid: Floats, t: Floats, c: Floats) -> Floats:
    """Return the least sum of squared relative errors for each b of the grid, (n,)."""
    share = -np.expm1(-np.outer(grid, t)) / c
    peak = share.sum(1) / (share**2).sum(1)
    return np.asarray(((peak[:, None] * share - 1.0) ** 2).sum(1))

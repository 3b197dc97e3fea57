"""The fast exact planner: the least time to the first token, and the proof that there is none less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.problem import Cut, Task, makespan
from edgellm.coldstart.solver.label_search import Search, Stop
from edgellm.coldstart.solver.lp_bound import Bound, Columns, prices, shares
from edgellm.coldstart.solver.stage_costs import Tables
from edgellm.coldstart.solver.warm_start import Orders

MARGIN = 1e-8
"""A plan is better where it is so by more than this share of T."""
WIDTHS = (100, 1000, None)
"""Labels that a pass follows: narrow passes find good plans, the last one looks everywhere."""
NEAR = 1e-2
"""As near to each other, as a share, the first passes bring what is found and what is not."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan found, what it takes, and what no plan undercuts (by more than a hundred millionth), in seconds."""

    cut: Cut
    seconds: float
    floor: float

    @property
    def optimal(self) -> bool:
        return self.floor >= self.seconds * (1.0 - 2.0 * MARGIN)

    @property
    def gap(self) -> float:
        """By what share it might be better, at most."""
        return 0.0 if self.optimal else 1.0 - self.floor / self.seconds


def never() -> bool:
    return False


def fastest(task: Task, stop: Stop = never) -> Found | None:
    """The plan of least T (equation 23), with its proof; None where the devices together do not hold the layers.

    Is there a plan a little better than the best one known? If so, that is the best one known; if not, and nothing was
    left out, it is the optimum. `stop` is asked every few milliseconds whether to give up with what there is.
    """
    tables = Tables(task)
    orders, search, columns = Orders(tables), Search(tables), Columns.of(tables)
    if (start := orders.start() or _any(search, columns)) is None:
        return None
    high, best = start
    low = floor(columns, task.layers, high)
    bound = Bound(columns, high)
    for width in WIDTHS:
        reach = low  # below it nothing was found at this width
        while low < high * (1.0 - MARGIN):
            limit = high * (1.0 - MARGIN)
            if width == WIDTHS[0] and high - reach > NEAR * high:
                limit = (high + reach) / 2.0
            if high < 0.995 * bound.until:
                bound = Bound(columns, high)
            cuts, whole = search.within(limit, bound, width, stop)
            if cuts:
                high, best = min(orders.better(cut) for cut in cuts)
                reach = low
                continue
            if stop():
                return Found(best, high, low)
            low, reach = (limit, limit) if whole else (low, limit)
            if limit >= high * (1.0 - MARGIN):
                break
    return Found(best, high, high if low >= high * (1.0 - MARGIN) else low)


def _any(search: Search, columns: Columns) -> tuple[float, Cut] | None:
    """Some plan that fits, where none suggests itself: memories may be so tight that unlike layers are hard to pack."""
    task = search.tables.task
    late = float(task.load.sum() + task.compute.sum() + task.send.sum())
    bound = Bound(columns, late)
    for width in WIDTHS:
        cuts, whole = search.within(late, bound, width, never)
        if cuts or whole:
            return min(((makespan(task, cut), cut) for cut in cuts), default=None)
    return None


def floor(columns: Columns, layers: int, high: float) -> float:
    """A T that no plan undercuts: where the prices leave no room for all layers. At most `high`."""
    for _ in range(3):
        until = high + columns.spared
        moments, price = prices(columns, until)
        left = layers - float(shares(columns, moments, price, until).sum()) - 1e-6
        if np.maximum(until - moments, 0.0) @ price < left:
            return high
        below, above = 0.0, until
        for _ in range(40):
            middle = (below + above) / 2.0
            short = np.maximum(middle - moments, 0.0) @ price < left
            below, above = (middle, above) if short else (below, middle)
        high = below - columns.spared
    return max(0.0, high)

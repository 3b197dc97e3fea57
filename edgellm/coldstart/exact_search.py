"""The fast exact planner: the least time to the first token, and the proof that no plan is faster."""

from __future__ import annotations

import numpy as np

from edgellm.coldstart.label_search import Search
from edgellm.coldstart.lp_bound import Bound, Columns, prices, shares
from edgellm.coldstart.problem import MARGIN, Cut, Solution, Stop, Task, makespan, never
from edgellm.coldstart.warm_start import Orders, Tables

WIDTHS = (100, 1000, None)
"""Labels that a pass follows: narrow passes find good plans, the last one looks everywhere."""
NEAR = 1e-2
"""The gap, as a share of T, to which the first passes bring the best plan found and the limit at which none was."""


def fastest_first_token(task: Task, stop: Stop = never) -> Solution | None:
    """Return the plan of least T (equation 23), with a lower bound; None if the devices together cannot hold the
    layers.

    Each pass searches for a plan slightly better than the best known one, which it replaces. If there is none and the
    search was exhaustive, the best known plan is optimal. `stop` is polled every few milliseconds: whether to return
    the best plan so far.
    """
    tables = Tables(task)
    orders, search, columns = Orders(tables), Search(tables), Columns.of(tables)
    if (start := orders.start() or _find_any(search, columns)) is None:
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
                return Solution(best, high, low)
            low, reach = (limit, limit) if whole else (low, limit)
            if limit >= high * (1.0 - MARGIN):
                break
    return Solution(best, high, high if low >= high * (1.0 - MARGIN) else low)


def _find_any(search: Search, columns: Columns) -> tuple[float, Cut] | None:
    """Search for any plan that fits, if no warm start does: unlike layers are hard to pack into tight memories."""
    task = search.tables.task
    late = float(task.opening.sum() + task.load.sum() + task.compute.sum() + task.send.sum())
    bound = Bound(columns, late)
    for width in WIDTHS:
        cuts, whole = search.within(late, bound, width, never)
        if cuts or whole:
            return min(((makespan(task, cut), cut) for cut in cuts), default=None)
    return None


def floor(columns: Columns, layers: int, high: float) -> float:
    """Return a lower bound on T: below it, the prices leave no room for all layers. At most `high`."""
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

"""The fast exact planner: the least time to the first token, and the proof that it is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.labels import Search
from edgellm.coldstart.prices import Bound, Columns, prices, shares
from edgellm.coldstart.tables import Tables
from edgellm.coldstart.task import Cut, Task, fits, makespan

MARGIN = 1e-8
"""A plan is better where it is so by more than this share."""
WIDTHS = (100, 1000, None)
BINS = 16


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan found, its T in seconds, and a T that no plan undercuts (by more than a hundred millionth)."""

    cut: Cut
    seconds: float
    floor: float

    @property
    def gap(self) -> float:
        """By what share of T it might be better at most."""
        return max(0.0, 1.0 - self.floor / self.seconds) if self.seconds > 0.0 else 0.0


def fastest(task: Task, stop: Callable[[], bool] = lambda: False) -> Found | None:
    """The plan of least T, with its proof; None where no plan fits. `stop` is asked now and then whether to give up."""
    tables = Tables(task)
    polish = Polish(tables)
    best = polish.start()
    if best is None:
        return None
    best_t = makespan(task, best)
    search, columns = Search(tables), Columns.of(tables)
    low = floor(columns, task.layers, best_t)
    bound = None
    for width in WIDTHS:
        reach = low
        while low < best_t * (1.0 - MARGIN):
            limit = best_t * (1.0 - MARGIN)
            if width == WIDTHS[0] and best_t - reach > 4e-3 * best_t:
                limit = (best_t + reach) / 2
            if bound is None or best_t < 0.995 * bound.limit:
                bound = Bound(columns, best_t, BINS)
            cuts, whole = search.within(limit, bound, width, stop)
            if cuts:
                best_t, best = min(polish.better(cut) for cut in cuts)
                reach = low
                continue
            if stop():
                return Found(best, best_t, low)
            reach = limit
            if whole:
                low = limit
            if limit >= best_t * (1 - MARGIN):
                break
    return Found(best, best_t, best_t)


def floor(columns: Columns, layers: int, high: float) -> float:
    """A T that no plan undercuts: where the prices leave no room for all layers."""
    for _ in range(3):
        until = high + columns.spared
        moments, price = prices(columns, until)
        left = layers - shares(columns, moments, price, until).sum() - 1e-6
        if np.maximum(until - moments, 0.0) @ price < left:
            return high
        low, top = 0.0, until
        for _ in range(40):
            middle = (low + top) / 2.0
            low, top = (middle, top) if np.maximum(middle - moments, 0.0) @ price < left else (low, middle)
        high = low - columns.spared
    return max(0.0, high)


class Polish:
    """Better sizes for the stages of a given order."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.task = tables, tables.task
        self.own = tables.own.tolist()
        self.compute = tables.compute.tolist()
        self.load = tables.load.tolist()
        self.send = tables.task.send.tolist()

    def fill(self, order: Sequence[int], limit: float) -> Cut | None:
        """From the last stage on, each as large as the limit lets it be; None where that does not hold all layers."""
        left, due, cut = self.task.layers, limit, []
        for at in reversed(range(len(order))):
            device = order[at]
            row = 0 if self.tables.ends == 1 else left
            n = min(bisect_right(self.own[device][row], due) - 1, left)
            if n < 1:
                continue
            cut.append((device, n))
            left -= n
            if not left:
                return tuple(reversed(cut))
            due -= self.compute[device][row][n]
            if at:
                due -= self.send[order[at - 1]][device]
        return None

    def better(self, cut: Cut) -> tuple[float, Cut]:
        order = [device for device, _ in cut]
        best, t = cut, makespan(self.task, cut)
        low, high = 0.0, t
        for _ in range(20):
            middle = (low + high) / 2
            made = self.fill(order, middle)
            if made is None or not fits(self.task, made):
                low = middle
                continue
            taken = makespan(self.task, made)
            if taken < t:
                best, t = made, taken
            high = middle
        return t, best

    def start(self) -> Cut | None:
        task = self.task
        found = []
        singles = [((d, task.layers),) for d in range(task.devices)]
        found += [(makespan(task, c), c) for c in singles if fits(task, c)]
        load, compute = task.load.mean(1), task.compute.mean(1)
        big = float(task.load.sum() + task.compute.sum() + task.send.sum())
        for key in (load, -compute, load + compute, -compute/load, load/compute):
            for sign in (1,-1):
                order = np.argsort(sign*key, kind="stable").tolist()
                made = self.fill(order, big)
                if made is None: continue
                t, made = self.better(made) if len(made)==len(order) else self.best_of(order, big)
                found.append((t, made))
        return min(found)[1] if found else None

    def best_of(self, order, big):
        low, high = 0.0, big
        best, t = None, math.inf
        for _ in range(30):
            middle = (low + high)/2
            made = self.fill(order, middle)
            if made is None: low = middle; continue
            taken = makespan(self.task, made)
            if taken < t: best, t = made, taken
            high = min(middle, taken)
            if high-low < 1e-6*high: break
        return t, best

"""Good plans at once, and better sizes for the stages of a given order: the start of the exact search."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from edgellm.coldstart.problem import Cut, fits, makespan
from edgellm.coldstart.solver.stage_costs import Tables

HALVINGS = 24


class Orders:
    """Plans of one task by the order of their devices."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.task = tables, tables.task
        self._own, self._compute = tables.own.tolist(), tables.compute.tolist()
        self._send = tables.task.send.tolist()

    def filled(self, order: Sequence[int], limit: float) -> Cut | None:
        """Fill devices, the last one first, with all layers that the limit allows; return None if some are left."""
        left, due, cut = self.task.layers, limit, []
        for at in reversed(range(len(order))):
            device = order[at]
            row = 0 if self.tables.ends == 1 else left
            count = min(bisect_right(self._own[device][row], due) - 1, left)
            if count < 1:
                continue
            cut.append((device, count))
            left -= count
            if not left:
                return tuple(reversed(cut))
            due -= self._compute[device][row][count]
            if at:
                due -= self._send[order[at - 1]][device]
        return None

    def sized(self, order: Sequence[int], high: float) -> tuple[float, Cut] | None:
        """Return the best plan, with its T, that a bisection of `filled`'s limit up to `high` finds for an order."""
        best: tuple[float, Cut] | None = None
        low = 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            cut = self.filled(order, middle)
            if cut is None or not fits(self.task, cut):
                low = middle
                continue
            found = makespan(self.task, cut), cut
            best = found if best is None else min(best, found)
            high = min(middle, best[0])
        return best

    def better(self, cut: Cut) -> tuple[float, Cut]:
        """Return the plan, or a better one of the same order, with its T."""
        taken = makespan(self.task, cut)
        return min((taken, cut), self.sized([device for device, _ in cut], taken) or (math.inf, cut))

    def start(self) -> tuple[float, Cut] | None:
        """Return the best of some heuristic plans, with its T; None if none of them fits."""
        task = self.task
        high = float(task.load.sum() + task.compute.sum() + task.send.sum())
        singles: list[Cut] = [((device, task.layers),) for device in range(task.devices)]
        found: list[tuple[float, Cut]] = [(makespan(task, cut), cut) for cut in singles if fits(task, cut)]
        load, compute = task.load.mean(1), task.compute.mean(1) + 1e-300
        for key in (load, compute, load + compute, load / compute, task.room):
            order = np.argsort(key, kind="stable").tolist()
            found += [one for each in (order, order[::-1]) if (one := self.sized(each, 2.0 * high))]
        return min(found, default=None)

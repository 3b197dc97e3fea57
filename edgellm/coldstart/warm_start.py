"""Good plans at once, and better sizes for the stages of a given order: the start of the exact search."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgellm.coldstart.problem import Cut, Floats, Ints, Task, fits, last_of_file, makespan

SLACK = 1e-12  # a share: rounding of sums must not make a stage too big for a memory that it just fits


@dataclass(frozen=True, eq=False)
class Tables:
    """Stages by (device e, layer `end` after the last one, number of layers n), for the backward search.

    A row is a pair (e, end); if all layers are equal, `end` is irrelevant and there is one row per device.
    """

    task: Task

    @cached_property
    def ends(self) -> int:
        """Rows per device: 1, or L + 1."""
        return 1 if self.task.uniform else self.task.layers + 1

    def row(self, device: Ints, end: Ints) -> Ints:
        return device if self.ends == 1 else device * self.ends + end

    @cached_property
    def _windows(self) -> tuple[Floats, Floats, Floats]:
        """`load`, `compute` and `need` of every row and length, (K, ends, L + 1); infinite where there is no stage."""
        task = self.task
        n, ends = task.layers, [task.layers] if self.ends == 1 else list(range(task.layers + 1))
        made = []
        for cost in (task.load, task.compute, np.broadcast_to(task.need, task.load.shape)):
            sums = np.concatenate([np.zeros((task.devices, 1)), np.cumsum(cost, 1)], 1)
            table = np.full((task.devices, len(ends), n + 1), np.inf)
            for at, end in enumerate(ends):
                table[:, at, : end + 1] = sums[:, end : end + 1] - sums[:, end::-1]
            made.append(table)
        return made[0], made[1], made[2]

    @cached_property
    def load(self) -> Floats:
        """Seconds until a stage has loaded its layers, (K, ends, L + 1)."""
        load = self._windows[0] + self.task.opening[:, None, None]
        load[:, :, 0] = 0.0
        return load

    @cached_property
    def compute(self) -> Floats:
        return self._windows[1]

    @cached_property
    def head(self) -> Floats:
        """The earliest effective start of a stage's work: its load, or less where work overlaps it.

        A stage that starts at s is done at `max(s, head) + compute`, in all timing models (in `paper` s is when it may
        receive, and the sending comes in between).
        """
        task = self.task
        if task.overlap != "streamed":
            return self.load
        n = task.layers
        table = np.full(self.load.shape, np.inf)
        for at in range(self.ends):
            end = n if self.ends == 1 else at
            # own(m) = max(load of all m + last compute ..., own within): from first to last, streamed
            table[:, at, 0] = 0.0
            for first in range(end):
                loads = np.cumsum(task.load[:, first:end], 1)[:, last_of_file(task.files[first:end])]
                loads += task.opening[:, None]
                works = np.cumsum(task.compute[:, first:end][:, ::-1], 1)[:, ::-1]
                table[:, at, end - first] = (loads + works).max(1) - self.compute[:, at, end - first]
        return np.where(np.isfinite(table), np.maximum(table, 0.0), np.inf)

    @cached_property
    def own(self) -> Floats:
        """Seconds that a stage takes alone, (K, ends, L + 1), infinite where it does not fit or may not begin or end;
        otherwise it rises with n."""
        fits = self._windows[2] <= self.task.capacity[:, None, None] * (1.0 + SLACK)
        with np.errstate(invalid="ignore"):
            own = np.where(fits & np.isfinite(self.load), self.head + self.compute, np.inf)
        if self.task.bounded:
            for end in range(1, self.task.layers + 1):
                begins = self.task.begins[:, :end][:, ::-1] & self.task.ends[:, end - 1 : end]
                own[:, end, 1 : end + 1][~begins] = np.inf
        own[:, :, 0] = 0.0
        return own

    @cached_property
    def most(self) -> Ints:
        """The most layers of a stage, per row."""
        many: Ints = np.where(np.isfinite(self.own), np.arange(self.task.layers + 1), 0).max(2).reshape(-1)
        return many


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
        high = float(task.opening.sum() + task.load.sum() + task.compute.sum() + task.send.sum())
        singles: list[Cut] = [((device, task.layers),) for device in range(task.devices)]
        found: list[tuple[float, Cut]] = [(makespan(task, cut), cut) for cut in singles if fits(task, cut)]
        load, compute = task.load.mean(1), task.compute.mean(1) + 1e-300
        for key in (load, compute, load + compute, load / compute, task.capacity):
            order = np.argsort(key, kind="stable").tolist()
            found += [one for each in (order, order[::-1]) if (one := self.sized(each, 2.0 * high))]
        return min(found, default=None)

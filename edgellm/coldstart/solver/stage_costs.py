"""Lookup tables of a task for the searches: by device, the first layer after a stage, and the stage's length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgellm.coldstart.problem import Floats, Ints, Task

SLACK = 1e-12  # a share: rounding of sums must not make a stage too big for a memory that it just fits


@dataclass(frozen=True, eq=False)
class Tables:
    """Stages by (device e, layer `end` behind the last one, number of layers n), for the backward search.

    A row is a pair (e, end); where all layers are equal, `end` makes no difference and there is one row a device.
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
        return self._windows[0]

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
            for first in range(end + 1):
                loads = np.cumsum(task.load[:, first:end], 1)
                works = np.cumsum(task.compute[:, first:end][:, ::-1], 1)[:, ::-1]
                own = (loads + works).max(1) if end > first else np.zeros(task.devices)
                table[:, at, end - first] = own - self.compute[:, at, end - first]
        return np.where(np.isfinite(table), np.maximum(table, 0.0), np.inf)

    @cached_property
    def own(self) -> Floats:
        """Seconds that a stage takes alone, (K, ends, L + 1), infinite where it does not fit; rises with n."""
        fits = self._windows[2] <= self.task.room[:, None, None] * (1.0 + SLACK)
        with np.errstate(invalid="ignore"):
            own = np.where(fits & np.isfinite(self.load), self.head + self.compute, np.inf)
        own[:, :, 0] = 0.0
        return own

    @cached_property
    def most(self) -> Ints:
        """The most layers that fit, per row."""
        many: Ints = np.isfinite(self.own).sum(2).reshape(-1)
        return many - 1

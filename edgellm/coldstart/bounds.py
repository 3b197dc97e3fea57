"""Tables of the times of stages, and an upper bound on the layers that can still be placed: prices on time, from a
small linear program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from edgellm.coldstart.problem import Floats, Ints, Task, last_of_file

MOMENTS = 40
"""Moments that may get a price at first; the grid is refined around priced moments, `REFINED` times."""
REFINED = 2
PIVOTS = 600
"""Most steps of the simplex method; it hardly ever needs more, and nothing depends on its end."""
BINS = 16
"""Ranges of time with a table of what a device adds."""
CELLS = 32
"""Linear pieces of the worth of time in a range."""
SLACK = 1e-12  # share: rounding of sums must not make a stage too big for memory that it just fits


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


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The choices "device m takes n layers", each at its cheapest position in the model.

    `head` is the moment before which its work cannot begin, and `work` the seconds of work and of a part of the sending
    before and after it, (K, n); infinite for impossible choices. The first stage saves the part of the sending before
    it, `before`, (K,); the last stage saves the part after it, at most `behind`.
    """

    head: Floats
    work: Floats
    before: Floats
    behind: float

    @staticmethod
    def of(tables: Tables) -> Columns:
        fits = np.isfinite(tables.own)
        head = np.where(fits, tables.head, np.inf).min(1)[:, 1:]
        work = np.where(fits, tables.compute, np.inf).min(1)[:, 1:]
        before, behind = potentials(tables.task.send)
        if tables.task.overlap != "paper":
            head = head - before[:, None]  # it may receive before it has loaded
        return Columns(head, work + (before + behind)[:, None], before, float(behind.max()))

    @property
    def spared(self) -> float:
        """The most seconds of sending that a whole plan is charged but does not spend."""
        return self.behind + float(self.before.max())


def potentials(send: Floats) -> tuple[Floats, Floats]:
    """Return a split of the sending times, (K,) each, `before` a stage and `behind` it, with before[b] + behind[a] <=
    send[a, b] and the largest possible sum."""
    k = send.shape[0]
    if k == 1 or not send.any():
        return np.zeros(k), np.zeros(k)
    sender, receiver = np.nonzero(~np.eye(k, dtype=bool))
    every = np.arange(k)
    rows = np.hstack([sender[:, None] == every, receiver[:, None] == every]).astype(float)
    both, _ = packing(rows, send[sender, receiver], np.ones(2 * k))
    before = both[k:] - both[k:].min()
    return before, np.where(np.eye(k, dtype=bool), np.inf, send - before).min(1)


def prices(columns: Columns, limit: float) -> tuple[Floats, Floats]:
    """Return the prices on time that best bound the layers placed until `limit`: moments (R,), and prices (R,).

    A stage that cannot begin its work before its head works, after any moment h, at least worked(h) = min(work, (head +
    work - h)^+) seconds, and no two stages work at a time. So: maximise sum n x[m, n] with sum_n x[m, n] <= 1 for each
    device, and for every moment h: sum worked(h) x <= limit - h. The prices are the duals of the latter. Any prices of
    0 or more give a bound, so it is sound even if the program is not solved to its end.
    """
    usable = columns.head + columns.work <= limit
    device, n = np.nonzero(usable)
    if not device.size:
        return np.zeros(1), np.zeros(1)
    head, work = columns.head[usable], columns.work[usable]
    once = device[None, :] == np.unique(device)[:, None]
    moments = np.linspace(0.0, limit, MOMENTS, endpoint=False)
    apart = limit / MOMENTS
    for again in range(REFINED + 1):
        worked = np.clip((head + work)[None, :] - moments[:, None], 0.0, work[None, :])
        capacity = np.concatenate([np.ones(once.shape[0]), limit - moments])
        price = packing(np.vstack([once, worked]), capacity, (n + 1).astype(np.float64))[1][-moments.size :]
        priced = moments[price > 1e-9]
        if again < REFINED and priced.size:  # finer, around the moments that have a price
            apart /= 3.0
            moments = np.unique(
                np.clip(np.concatenate([priced, priced - apart, priced + apart]), 0.0, limit * (1 - 1e-9))
            )
    return moments, price


def packing(rows: Floats, capacity: Floats, value: Floats) -> tuple[Floats, Floats]:
    """Maximise value x, with rows x <= room, x >= 0 and no negative inputs; return x, and the duals of the rows.

    The plain simplex method; the start x = 0 is feasible.
    """
    m, n = rows.shape
    table = np.zeros((m + 1, n + m + 1))
    table[:m, :n], table[:m, n : n + m], table[:m, -1] = rows, np.eye(m), capacity
    table[m, :n] = -value
    basis, ratio = np.arange(n, n + m), np.empty(m)
    for _ in range(PIVOTS):
        enter = int(table[m, :-1].argmin())
        if table[m, enter] > -1e-9:
            break
        ratio.fill(np.inf)
        np.divide(table[:m, -1], table[:m, enter], out=ratio, where=table[:m, enter] > 1e-10)
        leave = int(ratio.argmin())
        basis[leave] = enter
        table[leave] /= table[leave, enter]
        factor = table[:, enter].copy()
        factor[leave] = 0.0
        touched = np.flatnonzero(factor)
        table[touched] -= factor[touched, None] * table[leave]
    x = np.zeros(n + m)
    x[basis] = table[:m, -1]
    return np.maximum(x[:n], 0.0), np.maximum(table[m, n : n + m], 0.0)


def shares(columns: Columns, moments: Floats, price: Floats, limit: float) -> Floats:
    """Return s_m: the most that each device adds, (K,), at these prices, if it must be done by `limit`."""
    usable = columns.head + columns.work <= limit
    head, end = np.where(usable, columns.head, 0.0), np.where(usable, columns.head + columns.work, 0.0)
    grid = np.append(moments, limit)
    paid = np.maximum(grid[:, None] - moments, 0.0) @ price  # F
    gain = np.arange(1, head.shape[1] + 1) - (np.interp(end, grid, paid) - np.interp(head, grid, paid))
    most: Floats = np.where(usable, gain, 0.0).max(1)
    return np.maximum(most, 0.0)


class Bound:
    """An upper bound on the layers that the devices not yet placed can take, if the stage after them may start at rho.

    The bound is F(rho) + sum of s_m over the devices m not placed, F(rho) = sum of price x (rho - moment)^+, the worth
    of all time until rho. F is convex, so chords between the points of a table lie above it. s_m counts only sizes that
    are done by rho: there is a table for each of `BINS` ranges of rho; its sums are kept for two halves of the devices.
    Sound for all limits up to `until`.
    """

    def __init__(self, columns: Columns, until: float) -> None:
        k, bins = columns.head.shape[0], BINS
        first = float(columns.before.max())  # the first stage is charged for receiving, and does not receive
        self._shift = np.append(first - columns.before, first)
        self.until, self._limit, self._half = until, until + first, k // 2
        limit = self._limit
        line = np.empty((bins, CELLS + 1))
        low, high = np.empty((bins, 1 << self._half)), np.empty((bins, 1 << (k - self._half)))
        moments, price = prices(columns, limit)
        for at in range(bins):
            begin, end = limit * at / bins, limit * (at + 1) / bins
            rho = np.linspace(begin, end, CELLS + 1)
            line[at] = np.maximum(rho[:, None] - moments, 0.0) @ price
            left = shares(columns, moments, price, end)
            low[at], high[at] = _sums(left[: self._half]), _sums(left[self._half :])
        self._low, self._high, self._line = low.reshape(-1), high.reshape(-1), line.reshape(-1)

    def __call__(self, placed: Ints, head: Ints, rho: Floats) -> Floats:
        """Return the most layers; `placed` are masks of devices, and `head` is the device that the rest sends to."""
        found, part = self.paid(head, rho)
        found += self.others(placed, part)
        return found

    def paid(self, head: Ints, rho: Floats) -> tuple[Floats, Ints]:
        """Return F, the worth of the time until rho, convex in rho; and the range of time that rho is in."""
        where = np.minimum((rho + self._shift[head]) * (BINS * CELLS / self._limit), BINS * CELLS - 1e-6)
        cell = where.astype(np.int64)
        part = cell // CELLS
        at = cell + part
        found: Floats = self._line[at]
        found += (where - cell) * (self._line[at + 1] - found)
        return found, part

    def others(self, placed: Ints, part: Ints) -> Floats:
        """Return the sum of s_m over the devices not placed; larger for a later range."""
        found: Floats = self._low[(part << self._half) + (placed & ((1 << self._half) - 1))]
        found += self._high[part * (self._high.size // BINS) + (placed >> self._half)]
        return found


@lru_cache(maxsize=8)
def _bits(count: int) -> Floats:
    """Return which of `count` devices are not in each mask, (2^count, count)."""
    placed = np.arange(1 << count)[:, None] >> np.arange(count) & 1
    return (1 - placed).astype(np.float64)


def _sums(left: Floats) -> Floats:
    """Return the sum over the devices that are not placed, for each mask of placed ones."""
    return _bits(left.size) @ left

"""Tables of the times of stages, and an upper bound on the layers that can still be placed: prices on time, from a
small linear program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.problem import Floats, Ints, Task

MOMENTS = 40
"""Moments that may get a price at first, before the grid is refined around priced moments; and ranges of time with a
share of each device."""
PIVOTS = 600
"""Most steps of the simplex method; it hardly ever needs more, and nothing depends on its end."""


class Tables:
    """Stages by device, `end` after the last layer, and number of layers n, (K, L + 1, L + 1) each; infinite where
    there is none.

    `load`: seconds until a stage has loaded its layers. `compute`: seconds of its work. `head`: the earliest effective
    start of its work: its load, or less where work overlaps it. A stage that starts at s is done at `max(s, head) +
    compute`, in all timing models (in `paper` s is when it may receive, and the sending comes in between). `own`:
    seconds that it takes alone, infinite where it does not fit or may not begin or end; otherwise it rises with n.
    """

    def __init__(self, task: Task) -> None:
        k, n = task.load.shape
        self.task = task
        end = np.arange(n + 1)[:, None]
        first = end - np.arange(n + 1)

        def spans(sums: Floats) -> Floats:
            return np.where(first >= 0, sums[:, end] - sums[:, first], np.inf)

        loads, works, needs = (_sums(cost) for cost in (task.load, task.compute, np.tile(task.need, (k, 1))))
        self.compute = spans(works)
        self.load = spans(loads) + task.opening[:, None, None]
        self.load[:, :, 0] = 0.0
        self.head = self.load
        if task.overlap == "streamed":
            self.head = np.full_like(self.load, np.inf)
            self.head[:, :, 0] = 0.0
            file_ends = np.append(np.flatnonzero(task.files[1:]) + 1, n)[np.cumsum(np.append(False, task.files[1:]))]
            for at in range(1, n + 1):  # The latest of: a layer's file is loaded, and all from it on are computed.
                done = loads[:, np.minimum(file_ends[:at], at)] + works[:, at : at + 1] - works[:, :at]
                latest = np.maximum.accumulate(done[:, ::-1], 1) - loads[:, at - 1 :: -1] + task.opening[:, None]
                self.head[:, at, 1 : at + 1] = np.maximum(latest - self.compute[:, at, 1 : at + 1], 0.0)
        fits = spans(needs) <= task.room[:, None, None]
        nowhere = np.zeros((k, 1), bool)
        fits &= np.append(task.begins, nowhere, 1)[:, first] & np.append(nowhere, task.ends, 1)[:, end]
        with np.errstate(invalid="ignore"):
            self.own = np.where(fits & np.isfinite(self.load), self.head + self.compute, np.inf)
        self.own[:, :, 0] = 0.0


def _sums(cost: Floats) -> Floats:
    """Return the sums of each device's first n layers, (K, L + 1)."""
    return np.concatenate([np.zeros((len(cost), 1)), np.cumsum(cost, 1)], 1)


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
    moments, apart = np.linspace(0.0, limit, MOMENTS, endpoint=False), limit / MOMENTS / 3.0
    usable = columns.head + columns.work <= limit
    device, n = np.nonzero(usable)
    if not device.size:
        return moments, np.zeros(MOMENTS)
    head, work = columns.head[usable], columns.work[usable]
    once = device[None, :] == np.unique(device)[:, None]

    def priced(moments: Floats) -> Floats:
        worked = np.clip((head + work)[None, :] - moments[:, None], 0.0, work[None, :])
        capacity = np.concatenate([np.ones(once.shape[0]), limit - moments])
        return packing(np.vstack([once, worked]), capacity, (n + 1).astype(np.float64))[1][-moments.size :]

    price = priced(moments)
    if (best := moments[price > 1e-9]).size:
        moments = np.unique(np.clip(best[:, None] + (-apart, 0.0, apart), 0.0, limit * (1.0 - 1e-9)))
        price = priced(moments)
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


class Bound:
    """An upper bound on the layers that the devices not yet placed can take, if the stage after them may start at rho.

    The bound is F(rho) + sum of s_m over the devices m not placed. F(rho) = sum of price x (rho - moment)^+ is the
    worth of all time until rho, and s_m the most that m adds by a size that is done by the end of the range of time, of
    `MOMENTS`, that rho is in. Sound for all limits up to `until`.
    """

    def __init__(self, columns: Columns, until: float) -> None:
        first = float(columns.before.max())  # the first stage is charged for receiving, and does not receive
        self._shift = np.append(first - columns.before, first + columns.behind)  # the last one does not send
        self._limit = until + float(self._shift[-1])
        moments, price = prices(columns, self._limit)
        self._moments = np.append(moments, self._limit)
        self._worth = np.maximum(self._moments[:, None] - moments, 0.0) @ price
        done = columns.head + columns.work
        begin, end = (np.where(done <= self._limit, at, 0.0) for at in (columns.head, done))
        gain = np.arange(1, begin.shape[1] + 1) - (self._worth_until(end) - self._worth_until(begin))
        ends = self._limit * np.arange(1, MOMENTS + 1) / MOMENTS
        self._shares = np.maximum(np.where(done <= ends[:, None, None], gain, 0.0).max(2), 0.0)

    def worth(self, head: Ints, rho: Floats) -> Floats:
        """Return F for the stages before the device `head`, K: before none, if it may start at rho."""
        return self._worth_until(rho + self._shift[head])

    def shares(self, head: Ints, rho: Floats) -> Floats:
        """Return s_m of each device for the stages before the device `head`, (n, K)."""
        part = (rho + self._shift[head]) * (MOMENTS / self._limit)
        found: Floats = self._shares[np.minimum(part, MOMENTS - 1).astype(np.int64)]
        return found

    def _worth_until(self, moment: Floats) -> Floats:
        return np.interp(moment, self._moments, self._worth)

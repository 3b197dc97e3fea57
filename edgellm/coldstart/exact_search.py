"""The exact planner: the least time to the first token, and the proof that no plan is faster.

A search from the last stage to the first, level by level, in numpy, finds whether a plan is done by a given time. A
label is the end of a plan. Each level puts one more stage before every label, of each device and each size that its
time allows; labels that cannot become a whole plan (`Bound`), and dominated labels, are dropped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from edgellm.coldstart.costs import Floats
from edgellm.coldstart.problem import MARGIN, Cut, Ints, Solution, Stop, Task, fits, makespan, never

MOST = 2_000_000  # most labels kept of a level; before dominated labels are dropped there may be four times as many
WIDTHS = (100, 1000, 10_000, MOST)
"""Labels that a pass follows: narrow passes find good plans, the last pass looks everywhere."""
NEAR = 0.03
"""The gap, as a share of T, that the first passes leave between the best plan and the limit without a plan."""
TINY = 1e-11  # share of the time limit by which a stage may be late, and labels are equal, as sums are not exact
SLACK = 1e-7  # layers by which a bound may be wrong, as sums are not exact
CHUNK = 8_192  # labels expanded at once: the results stay in the processor's cache
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
    def of(tables: Tables) -> "Columns":
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


def fastest_first_token(task: Task, stop: Stop = never) -> Solution | None:
    """Return the plan of least T (equation 23), with a lower bound; None if the devices together cannot hold the
    layers. When `stop`, polled every few milliseconds, returns True, the best plan so far is returned."""
    tables = Tables(task)
    search, columns = Search(tables), Columns.of(tables)

    def within(limit: float, width: int, stop: Stop) -> tuple[list[Cut], bool]:
        return search.within(limit, Bound(columns, limit), width, stop)

    return improved(single_devices(task), partial(makespan, task), task.longest(), within, stop)


def single_devices(task: Task) -> Iterator[Cut]:
    """Yield the plans with all layers on one device."""
    yield from (cut for device in range(task.devices) if fits(task, cut := ((device, task.layers),)))


def improved(
    starts: Iterable[Cut], seconds: Callable[[Cut], float], late: float,
    within: Callable[[float, int, Stop], tuple[list[Cut], bool]], stop: Stop,
) -> Solution | None:  # fmt: skip
    """Return the best plan, and a lower bound on its `seconds`; None if there is none. Every plan is done by `late`.

    `within` searches for plans that are done by a limit, with a number of labels to follow, and returns whether it
    looked everywhere. Passes search for a plan better than the best known plan, which it replaces. If there is none and
    a search was exhaustive, the best known plan is optimal.
    """
    high, best = min(((seconds(cut), cut) for cut in starts), default=(late, ()))
    low = 0.0
    for width in WIDTHS:
        reach = low  # below it nothing was found at this width
        while low < high * (1.0 - MARGIN):
            limit = high * (1.0 - MARGIN)
            if best and width < MOST and high - reach > NEAR * high:
                limit = (high + reach) / 2.0
            # The first passes are short, and without them no plan is good.
            halt = never if width == WIDTHS[0] or not best else stop
            cuts, whole = within(limit, width, halt)
            if cuts:
                high, best = min((seconds(cut), cut) for cut in cuts)
                continue
            if halt():
                return Solution(best, high, low)
            low, reach = limit if whole else low, limit
            if limit >= high * (1.0 - MARGIN):
                break
    if not best:
        return None
    return Solution(best, high, high if low >= high * (1.0 - MARGIN) else low)


class Arrays:
    """Arrays of one length, the fields of a record."""

    __slots__: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(getattr(self, self.__slots__[0]))

    def take(self, which: Ints) -> Self:
        return type(self)(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Labels(Arrays):
    """Labels: partial plans built from the last stage, all with the same number of stages, as arrays of one length.

    `placed` is the mask of their devices; `head` the device of their first stage, K if there is none yet; `left` the
    layers before it; `rho` the latest moment at which it may start to receive or, if it is the first, to compute;
    `load` its own load, which in the paper's timing precedes receiving; `spare` the layers that could be placed before
    it beyond those that are left. `parent` and `count` are the label that it extends, and the layers of its own stage.
    """

    placed: Ints
    head: Ints
    left: Ints
    rho: Floats
    load: Floats
    spare: Floats
    parent: Ints
    count: Ints


End = tuple[float, int, int, int]
"""A complete plan: how late its first stage is, the label before which it stands, its device and its layers."""


class Search:
    """The search for one task; `within` runs it for a time limit."""

    def __init__(self, tables: Tables) -> None:
        task = tables.task
        self.k, self.n = task.devices, task.layers
        self.paper = task.overlap == "paper"
        self.send_to = np.zeros((self.k + 1, self.k))  # seconds; 0 to the device K, after the last stage
        self.send_to[: self.k] = task.send.T
        others = ~np.eye(self.k, dtype=bool)
        self.least_in = np.where(others, task.send, np.inf).min(0)  # seconds to send to each device, at least
        self.most_in = np.where(others, task.send, 0.0).max(0)
        own = tables.own.reshape(-1, self.n + 1)
        self.apart = 1.0 + 2.0 * float(own[np.isfinite(own)].max())
        filled = np.where(np.isfinite(own), own, 0.75 * self.apart)
        self.own = (filled + np.arange(own.shape[0])[:, None] * self.apart).reshape(-1)  # concatenated ascending rows
        self.compute, self.load = tables.compute.reshape(-1), tables.load.reshape(-1)

    def within(self, limit: float, bound: Bound, width: int, stop: Stop) -> tuple[list[Cut], bool]:
        """Return some plans done by `limit`, if there are any, and whether the search was exhaustive.

        Only the `width` most promising labels of each level are followed. Return early once `stop` is true.
        """
        one = np.zeros(1, dtype=np.int64)
        level = Labels(one, one + self.k, one + self.n, np.array([limit]), np.zeros(1), np.zeros(1), one, one)
        levels, whole = list[Labels](), True
        while len(level):
            levels.append(level)
            ends: list[End] = []
            parts: list[Labels] = []
            for begin in range(0, len(level), CHUNK):
                some = np.arange(begin, min(begin + CHUNK, len(level)))
                found = self._extended(level, some, limit, bound)
                if isinstance(found, Labels):
                    parts.append(found)
                else:
                    ends += found
                if stop() or sum(map(len, parts)) > 4 * MOST:  # half a gigabyte
                    whole &= begin + CHUNK >= len(level)
                    break
            if ends:
                return [self._plan(levels, *end) for _, *end in sorted(ends)[:4]], False
            if stop():
                return [], False
            level = self._undominated(Labels.joined(parts), limit)
            if len(level) > width:
                level, whole = level.take(np.argpartition(-level.spare, width)[:width]), False
        return [], whole

    def _extended(self, labels: Labels, some: Ints, limit: float, bound: Bound) -> Labels | list[End]:
        """Return the labels with one more stage before `some`, of every size, as far as the layers left can be placed
        before it; or, if there are any, complete plans."""
        head, rho, left = labels.head[some], labels.rho[some], labels.left[some]
        free = labels.placed[some, None] >> np.arange(self.k) & 1 == 0
        shares = np.where(free, bound.shares(head, rho), 0.0)
        others = shares.sum(1)
        free[bound.worth(head, rho) + others < left - SLACK] = False
        due = rho[:, None] - self.send_to[head]  # when the new stage must be done
        free &= due > 0.0
        if self.paper:
            free &= labels.load[some, None] <= due + TINY * limit
        at, device = np.nonzero(free)
        label, due = some[at], due[at, device]
        left = left[at]
        row = device * (self.n + 1) + left
        most = np.searchsorted(self.own, np.minimum(due + TINY * limit, 0.7 * self.apart) + row * self.apart, "right")
        most = most - 1 - row * (self.n + 1)
        ended = np.flatnonzero(most >= left)
        if ended.size:
            late = self.own[row[ended] * (self.n + 1) + left[ended]] - row[ended] * self.apart - due[ended]
            soonest = np.argsort(late)[:4]
            parts = (late[soonest], *(part[ended[soonest]] for part in (label, device, left)))
            return list(zip(*(part.tolist() for part in parts), strict=True))
        which = np.repeat(np.arange(most.size), most)
        count = np.arange(1, which.size + 1) - np.repeat(np.cumsum(most) - most, most)
        others = (others[at] - shares[at, device])[which]
        at, device, label = row[which] * (self.n + 1) + count, device[which], label[which]
        rho, left = due[which] - self.compute[at], left[which] - count
        spare = bound.worth(device, rho) + others - left
        keep = spare >= -SLACK
        if self.paper:
            keep &= self.load[at] + self.least_in[device] <= rho + TINY * limit
        else:
            keep &= rho > self.least_in[device]
        kept = np.flatnonzero(keep)
        device, label = device[kept], label[kept]
        placed = labels.placed[label] | 1 << device
        return Labels(placed, device, left[kept], rho[kept], self.load[at[kept]], spare[kept], label, count[kept])

    def _undominated(self, labels: Labels, limit: float) -> Labels:
        """Drop labels dominated by a label with the same devices, the same first device and as many layers left that
        may be done as late or later whichever device precedes it."""
        if not len(labels):
            return labels
        offers = labels.rho
        if self.paper:  # no offer where some device would send too slowly for the head's own load
            offers = np.where(labels.load + self.most_in[labels.head] <= labels.rho, labels.rho, 0.0)
        group = (labels.placed * self.k + labels.head) * (self.n + 1) + labels.left
        order = np.argsort(group)
        fresh = np.diff(group[order], prepend=-1) != 0
        part, offers = np.cumsum(fresh) - 1, offers[order]
        best = np.maximum.reduceat(offers, np.flatnonzero(fresh))[part]
        better = labels.rho[order] > best + TINY * limit
        tops = np.flatnonzero(offers == best)
        better[tops[np.diff(part[tops], prepend=-1) != 0]] = True  # One of equal labels.
        return labels.take(np.sort(order[better]))

    def _plan(self, levels: list[Labels], label: int, device: int, count: int) -> Cut:
        """Return a whole plan's stages: tracing the labels back goes from the first stage to the last."""
        stages = [(device, count)]
        for level in reversed(levels[1:]):
            stages.append((int(level.head[label]), int(level.count[label])))
            label = int(level.parent[label])
        return tuple(stages)

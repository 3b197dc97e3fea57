"""The exact planner: the least time to the first token, and the proof that no plan is faster.

A search from the last stage to the first, level by level, in numpy, finds whether a plan is done by a given time. A
label is the end of a plan. Each level puts one more stage before every label, of each device and each size that its
time allows; labels that cannot become a whole plan (`Bound`), and dominated labels, are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgellm.coldstart.bounds import Bound, Columns, Tables, prices, shares
from edgellm.coldstart.problem import MARGIN, Cut, Floats, Ints, Solution, Stop, Task, fits, makespan, never

WIDTHS = (100, 1000, None)
"""Labels that a pass follows: narrow passes find good plans, the last pass looks everywhere."""
NEAR = 1e-2
"""The gap, as a share of T, that the first passes leave between the best plan and the limit without a plan."""
TINY = 1e-11  # share of the time limit by which a stage may be late, as sums are not exact
TIE = 1e-10  # share of the time limit within which labels are equal; far below the planner's margin
CHUNK = 8_192  # labels expanded at once: the results stay in the processor's cache
MOST = 2_000_000  # most labels kept of a level
GROWN = 8_000_000  # most labels of a level before dominated labels are dropped: half a gigabyte


def fastest_first_token(task: Task, stop: Stop = never) -> Solution | None:
    """Return the plan of least T (equation 23), with a lower bound; None if the devices together cannot hold the
    layers.

    Each pass searches for a plan slightly better than the best known plan, which it replaces. If there is none and the
    search was exhaustive, the best known plan is optimal. When `stop`, polled every few milliseconds, returns True, the
    best plan so far is returned.
    """
    tables = Tables(task)
    search, columns = Search(tables), Columns.of(tables)
    if (start := _single(task) or _find_any(search, columns)) is None:
        return None
    high, best = start
    low = floor(columns, task.layers, high)
    bound = Bound(columns, high)
    for width in WIDTHS:
        halt = never if width == WIDTHS[0] else stop  # the first passes are short, and without them no plan is good
        reach = low  # below it nothing was found at this width
        while low < high * (1.0 - MARGIN):
            limit = high * (1.0 - MARGIN)
            if width == WIDTHS[0] and high - reach > NEAR * high:
                limit = (high + reach) / 2.0
            if high < 0.995 * bound.until:
                bound = Bound(columns, high)
            cuts, whole = search.within(limit, bound, width, halt)
            if cuts:
                high, best = min((makespan(task, cut), cut) for cut in cuts)
                reach = low
                continue
            if halt():
                return Solution(best, high, low)
            low, reach = (limit, limit) if whole else (low, limit)
            if limit >= high * (1.0 - MARGIN):
                break
    return Solution(best, high, high if low >= high * (1.0 - MARGIN) else low)


def _single(task: Task) -> tuple[float, Cut] | None:
    """Return the best single device with its T; None if none can hold all layers."""
    cuts: list[Cut] = [((device, task.layers),) for device in range(task.devices)]
    return min(((makespan(task, cut), cut) for cut in cuts if fits(task, cut)), default=None)


def _find_any(search: Search, columns: Columns) -> tuple[float, Cut] | None:
    """Search for any plan that fits: unlike layers are hard to pack into tight memories."""
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
            return max(0.0, high)
        below, above = 0.0, until
        for _ in range(40):
            middle = (below + above) / 2.0
            short = np.maximum(middle - moments, 0.0) @ price < left
            below, above = (middle, above) if short else (below, middle)
        high = below - columns.spared
    return max(0.0, high)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels: partial plans built from the last stage, all with the same number of stages, as arrays of one length.

    `placed` is the mask of their devices; `head` the device of their first stage, K if there is none yet; `left` the
    layers before it; `rho` the latest moment at which it may start to receive or, if it is the first, to compute;
    `load` its own load, which in the paper's timing precedes receiving. `parent` and `count` are the label that it
    extends, and the layers of its own stage.
    """

    placed: Ints
    head: Ints
    left: Ints
    rho: Floats
    load: Floats
    parent: Ints
    count: Ints

    def __len__(self) -> int:
        return self.placed.size

    def take(self, which: np.ndarray) -> Labels:
        return Labels(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """New stages before labels: arrays of one length. `device` joins `placed` before `label`, which leaves `left`; it
    must be done by `due`, and has from `least` to `most` layers."""

    label: Ints
    device: Ints
    placed: Ints
    left: Ints
    due: Floats
    least: Ints
    most: Ints

    def take(self, which: np.ndarray) -> Stages:
        return Stages(*(getattr(self, name)[which] for name in self.__slots__))


def twins(task: Task) -> list[tuple[int, int]]:
    """Return pairs of identical devices: each device with its previous twin."""
    pairs, send = [], task.send
    for device in range(task.devices):
        for other in reversed(range(device)):
            swapped = np.arange(task.devices)
            swapped[[device, other]] = other, device
            same = (cost[device] == cost[other] for cost in (task.opening, task.load, task.compute, task.capacity))
            if all(np.all(equal) for equal in same) and np.array_equal(send[np.ix_(swapped, swapped)], send):
                pairs.append((device, other))
                break
    return pairs


class Search:
    """The search for one task; `within` runs it for a time limit."""

    def __init__(self, tables: Tables) -> None:
        task = tables.task
        self.tables, self.k, self.n = tables, task.devices, task.layers
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
        self.twins = twins(task)

    def within(self, limit: float, bound: Bound, width: int | None, stop: Stop) -> tuple[list[Cut], bool]:
        """Return some plans done by `limit`, if there are any, and whether the search was exhaustive.

        With a `width` only the most promising labels of each level are followed. Return early once `stop` is true.
        """
        one = np.zeros(1, dtype=np.int64)
        level = Labels(one, one + self.k, one + self.n, np.array([limit]), np.zeros(1), one, one)
        levels, whole = [level], True
        for depth in range(self.k):
            ends, level, every = self._expanded(level, limit, bound, stop)
            whole &= every
            if ends:
                return [self._plan(levels, *end) for end in ends], False
            if stop():
                return [], False
            level = self._undominated(level, limit)
            if len(level) > (width or MOST):
                spare = bound(level.placed, level.head, level.rho) - level.left
                level = level.take(np.argpartition(-spare, width or MOST)[: width or MOST])
                whole = False
            if not len(level) or depth == self.k - 1:
                break
            levels.append(level)
        return [], whole

    def _expanded(
        self, labels: Labels, limit: float, bound: Bound, stop: Stop
    ) -> tuple[list[tuple[int, int, int]], Labels, bool]:
        """Return complete plans with one more stage, as (label, device, layers), or else the labels with one more
        stage, and whether the expansion was exhaustive."""
        ended: list[tuple[float, tuple[int, int, int]]] = []
        parts: list[Labels] = []
        whole = True
        for begin in range(0, len(labels), CHUNK):
            stages, late = self._stages(labels, np.arange(begin, min(begin + CHUNK, len(labels))), limit)
            if late.size:
                soonest = np.argsort(late)[:4]
                ended += [
                    (float(late[at]), (int(stages.label[at]), int(stages.device[at]), int(stages.left[at])))
                    for at in soonest
                ]
            elif not ended:
                parts.append(self._sized(limit, bound, self._useful_sizes(bound, stages)))
            if stop() or sum(map(len, parts)) > GROWN:
                whole = begin + CHUNK >= len(labels)
                break
        if ended:
            return [end for _, end in sorted(ended)[:4]], labels, True
        grown = Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in Labels.__slots__))
        return [], grown, whole

    def _stages(self, labels: Labels, some: Ints, limit: float) -> tuple[Stages, Floats]:
        """Return the stages that can precede some labels, for all devices; if some complete a plan, only those, with
        their lateness."""
        all_devices = np.arange(self.k)
        due = labels.rho[some, None] - self.send_to[labels.head[some]]  # when the new stage must be done
        before = labels.placed[some]
        free = (due > 0.0) & (before[:, None] >> all_devices & 1 == 0)
        for twin, other in self.twins:  # equal devices in the order of their numbers only
            free[:, twin] &= before >> other & 1 == 1
        if self.paper:
            free &= labels.load[some, None] <= due + TINY * limit
        at, device = np.nonzero(free)
        label, due = some[at], due[at, device]
        left, placed = labels.left[label], before[at] | 1 << device
        row = self.tables.row(device, left)
        most = np.searchsorted(self.own, np.minimum(due + TINY * limit, 0.7 * self.apart) + row * self.apart, "right")
        most = most - 1 - row * (self.n + 1)
        stages = Stages(label, device, placed, left, due, np.ones_like(most), most)
        ended = np.flatnonzero(most >= left)
        if not ended.size:
            return stages, np.zeros(0)
        late = self.own[row[ended] * (self.n + 1) + left[ended]] - row[ended] * self.apart - due[ended]
        return stages.take(ended), late

    def _useful_sizes(self, bound: Bound, stages: Stages) -> Stages:
        """Return the stages with the sizes that can lead to a better plan.

        If all layers are equal, a stage of n layers begins at due - w n, and at most F(due - w n) layers and a sum over
        the other devices, largest for n = 1, can be placed before it: convex in n. So if one end of the range of n
        cannot place the layers left, the range is cut from that end to where the bound reaches them.
        """
        stages = stages.take(np.flatnonzero(stages.most))  # only devices that can take layers
        if self.tables.ends > 1:
            return stages
        work = self.compute[stages.device * (self.n + 1) + 1]
        paid, part = bound.paid(stages.device, stages.due - work)
        others = bound.others(stages.placed, part) - stages.left + 1e-7
        few = paid + others + 1.0 >= 0.0
        many = bound.paid(stages.device, stages.due - work * stages.most)[0] + others + stages.most >= 0.0
        some = np.flatnonzero(few | many)
        stages, work, others, few, many = stages.take(some), work[some], others[some], few[some], many[some]
        turn = np.flatnonzero(few != many)
        device, due, work, others, few = stages.device[turn], stages.due[turn], work[turn], others[turn], few[turn]
        low, high = np.ones_like(turn), stages.most[turn]  # between them the bound is crossed
        for _ in range(int(high.max(initial=1)).bit_length()):
            middle = (low + high) >> 1
            inside = (bound.paid(device, due - work * middle)[0] + others + middle >= 0.0) == few
            low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        least, most = stages.least.copy(), stages.most.copy()
        most[turn[few]], least[turn[~few]] = low[few], high[~few]
        return replace(stages, least=least, most=most)

    def _sized(self, limit: float, bound: Bound, stages: Stages) -> Labels:
        """Return the labels of every size of every new stage, as far as the layers left can be placed before it."""
        many = stages.most - stages.least + 1
        which = np.repeat(np.arange(many.size), many)
        count = np.arange(which.size) - np.repeat(np.cumsum(many) - many - stages.least, many)
        device, left = stages.device[which], stages.left[which]
        at = self.tables.row(device, left) * (self.n + 1) + count
        rho = stages.due[which] - self.compute[at]
        placed = stages.placed[which]
        keep = bound(placed, device, rho) >= left - count - 1e-7
        if self.paper:
            keep &= self.load[at] + self.least_in[device] <= rho + TINY * limit
        else:
            keep &= rho > self.least_in[device]
        kept = np.flatnonzero(keep)
        count, at = count[kept], at[kept]
        return Labels(
            placed[kept], device[kept], left[kept] - count, rho[kept], self.load[at], stages.label[which[kept]], count
        )

    def _undominated(self, labels: Labels, limit: float) -> Labels:
        """Drop labels dominated by a label with the same devices and the same first device that leaves no more layers
        (exactly as many, if the layers differ) and may be done as late or later whichever device precedes it.
        """
        if len(labels) < 2:
            return labels
        offers, asks = labels.rho, labels.rho
        if self.paper:  # no offer where some device would send too slowly for the head's own load
            offers = np.where(labels.load + self.most_in[labels.head] <= labels.rho, labels.rho, 0.0)
        group = (labels.placed * self.k + labels.head) * (self.n + 1) + labels.left
        order = np.argsort(group, kind="stable")
        fresh = np.concatenate([[True], np.diff(group[order]) != 0])
        first, part = np.flatnonzero(fresh), np.cumsum(fresh) - 1
        offers, asks = np.maximum(offers[order], 0.0), asks[order]
        best = np.maximum.reduceat(offers, first)  # latest offer with as many layers left
        rivals = group[order[first]]
        if self.tables.ends == 1:  # all layers are alike: labels with different numbers of layers left compete, too
            rivals //= self.n + 1
        base = np.cumsum(np.concatenate([[0], np.diff(rivals) != 0])) * (2.0 * limit)  # keeps rivals' groups apart
        before = np.concatenate([[0.0], np.maximum.accumulate(base + best)[:-1]]) - base  # latest with fewer
        beaten = np.maximum(before, best)[part] >= asks - TIE * limit
        tops = np.flatnonzero(offers == best[part])
        tops = tops[np.concatenate([[True], part[tops[1:]] != part[tops[:-1]]])]  # keep one of equal labels ...
        beaten[tops] = before[part[tops]] >= asks[tops] - TIE * limit  # ... unless fewer layers left dominate
        return labels.take(np.sort(order[~beaten]))

    def _plan(self, levels: list[Labels], label: int, device: int, count: int) -> Cut:
        """Return a whole plan's stages: tracing the labels back goes from the first stage to the last."""
        stages = [(device, count)]
        for level in reversed(levels[1:]):
            stages.append((int(level.head[label]), int(level.count[label])))
            label = int(level.parent[label])
        return tuple(stages)

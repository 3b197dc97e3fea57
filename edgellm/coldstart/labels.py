"""Is there a plan that is done by a given time? A search from the last stage to the first, level by level, in numpy.

A label is the end of a plan. At each level one stage more is put before every label, of each device and each size that
its time allows; what cannot become a whole plan (`Bound`), and what another label makes needless, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.prices import Bound
from edgellm.coldstart.tables import Tables
from edgellm.coldstart.task import Cut, Floats, Ints

TINY = 1e-11  # of the time limit: how much later than it a stage may be for want of exact sums
TIE = 1e-10  # of the time limit: labels are as good as each other within it; far below the planner's margin
CHUNK = 200_000  # new labels looked at in one go
MOST = 2_000_000  # labels kept of a level at the most
GROWN = 8_000_000  # labels that may come of them before the needless ones are dropped, in half a gigabyte


Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Ends of plans, all with equally many stages: arrays of one length.

    `placed`, the mask of their devices; `head`, the device of the first of these stages, K where there is none yet;
    `left`, the layers before it; `rho`, the latest moment at which it may start to receive or, if it is the first, to
    compute; `load`, its own load, which in the paper's timing comes before it receives. `parent` and `count`: the label
    one level up that it continues, and the layers of its own stage.
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


class Search:
    """The search for one task; `within` runs it for a time limit."""

    def __init__(self, tables: Tables) -> None:
        task = tables.task
        self.tables, self.k, self.n = tables, task.devices, task.layers
        self.paper = task.overlap == "paper"
        self.send = np.zeros((self.k, self.k + 1))  # to the device K, which stands behind the last stage, for nothing
        self.send[:, : self.k] = task.send
        self.least_in, self.most_in, self.later = _receiving(task.send)
        own = tables.own.reshape(-1, self.n + 1)
        self.apart = 1.0 + 2.0 * float(own[np.isfinite(own)].max())
        filled = np.where(np.isfinite(own), own, 0.75 * self.apart)
        self.own = (filled + np.arange(own.shape[0])[:, None] * self.apart).reshape(-1)  # one rising row behind another
        self.compute, self.load = tables.compute.reshape(-1), tables.load.reshape(-1)
        self.twins = _twins(task.load, task.compute, task.room, task.send)

    def within(self, limit: float, bound: Bound, width: int | None, stop: Stop) -> tuple[list[Cut], bool]:
        """Plans done by `limit`, some of them if there are any, and whether the search has looked everywhere.

        With a `width` only the most promising labels of each level are followed. Returns early once `stop` says so.
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
        """Whole plans that begin before a label, as (label, device, layers); else one stage more before each label, and
        whether that is all of them.
        """
        everyone = np.arange(self.k)
        due = labels.rho[:, None] - self.send[:, labels.head].T  # (labels, K): when the new stage must be done
        free = (due > 0.0) & (labels.placed[:, None] >> everyone & 1 == 0)
        for twin, other in self.twins:  # equal devices in the order of their numbers only
            free[:, twin] &= labels.placed >> other & 1 == 1
        if self.paper:
            free &= labels.load[:, None] <= due + TINY * limit
        label, device = np.nonzero(free)
        left, due = labels.left[label], due[label, device]
        row = self.tables.row(device, left)
        most = np.searchsorted(self.own, np.minimum(due + TINY * limit, 0.7 * self.apart) + row * self.apart, "right")
        most = most - 1 - row * (self.n + 1)
        if (ended := np.flatnonzero(most >= left)).size:
            late = self.own[row[ended] * (self.n + 1) + left[ended]] - row[ended] * self.apart - due[ended]
            return (
                [(int(label[at]), int(device[at]), int(left[at])) for at in ended[np.argsort(late)[:4]]],
                labels,
                True,
            )
        parts: list[Labels] = []
        chunks = np.array_split(np.arange(label.size), 1 + int(most.sum()) // CHUNK)
        for some in chunks:
            parts.append(
                self._sized(labels, limit, bound, label[some], device[some], left[some], due[some], most[some])
            )
            if stop() or sum(map(len, parts)) > GROWN:
                break
        grown = Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in Labels.__slots__))
        return [], grown, len(parts) == len(chunks)

    def _sized(
        self, labels: Labels, limit: float, bound: Bound, label: Ints, device: Ints, left: Ints, due: Floats, most: Ints
    ) -> Labels:
        """Every size from 1 to `most` of every new stage, as far as the layers left can be placed before it."""
        which = np.repeat(np.arange(label.size), most)
        count = np.arange(which.size) - np.repeat(np.cumsum(most) - most, most) + 1
        device_, left_ = device[which], left[which]
        at = self.tables.row(device_, left_) * (self.n + 1) + count
        rho = due[which] - self.compute[at]
        placed = (labels.placed[label] | 1 << device)[which]
        keep = bound(placed, device_, rho) >= left_ - count - 1e-7
        if self.paper:
            keep &= self.load[at] + self.least_in[device_] <= rho + TINY * limit
        else:
            keep &= rho > self.least_in[device_]
        kept = np.flatnonzero(keep)
        count, at = count[kept], at[kept]
        return Labels(
            placed[kept], device_[kept], left_[kept] - count, rho[kept], self.load[at], label[which[kept]], count
        )

    def _undominated(self, labels: Labels, limit: float) -> Labels:
        """Without the labels that another one with the same devices makes needless.

        It does so if it leaves no more layers (any of its own could be given up: they are all alike; where they are
        not, exactly as many), and whatever device comes next may be done no earlier. First within each head, then
        across heads, the worst sending of one against the best of the other; then head by head.
        """
        for across in (False, True):
            if len(labels) > 1:
                labels = labels.take(self._best(labels, limit, across))
        return labels.take(self._pairwise(labels, limit)) if len(labels) > 1 else labels

    def _offers(self, labels: Labels) -> Floats:
        """rho, and 0 where in the paper's timing some device would send too slowly for the head's own load."""
        if not self.paper:
            return labels.rho
        return np.where(labels.load + self.most_in[labels.head] <= labels.rho, labels.rho, 0.0)

    def _group(self, labels: Labels) -> Ints:
        return labels.placed if self.tables.ends == 1 else labels.placed * (self.n + 1) + labels.left

    def _best(self, labels: Labels, limit: float, across: bool) -> Ints:
        """Those to keep of labels that compete: sorted by layers left, each against the best offer before it."""
        offers, asks, group = self._offers(labels), labels.rho, self._group(labels)
        if across:
            offers, asks = offers - self.most_in[labels.head], asks - self.least_in[labels.head]
        else:
            group = group * self.k + labels.head
        order: Ints = np.lexsort((-offers, labels.left, group))
        base = _base(group[order], limit)
        best = np.maximum.accumulate(base + np.maximum(offers[order], 0.0))
        beaten = best[:-1] >= base[1:] + asks[order][1:] - TIE * limit
        kept: Ints = order[np.concatenate([[True], ~beaten])]
        return kept

    def _pairwise(self, labels: Labels, limit: float) -> Ints:
        """Those to keep, each compared with the best of every other head, by the sending to just these two."""
        group = self._group(labels)
        order = np.lexsort((labels.left, group))
        labels, group = labels.take(order), group[order]
        base = _base(group, limit)
        fresh = np.concatenate([[True], (group[1:] != group[:-1]) | (labels.left[1:] != labels.left[:-1])])
        last = np.append(np.flatnonzero(fresh)[1:], len(labels))[np.cumsum(fresh) - 1] - 1  # with as many layers left
        offers, asks = base + self._offers(labels), base + labels.rho + TIE * limit
        beaten = np.zeros(len(labels), dtype=bool)
        for head in np.unique(labels.head):
            best = np.maximum.accumulate(np.where(labels.head == head, offers, base))[last]
            beaten |= best > asks + self.later[head, labels.head]
        return order[~beaten]

    def _plan(self, levels: list[Labels], label: int, device: int, count: int) -> Cut:
        """The way back from a whole plan, which is its way from the first stage to the last."""
        stages = [(device, count)]
        for level in reversed(levels[1:]):
            stages.append((int(level.head[label]), int(level.count[label])))
            label = int(level.parent[label])
        return tuple(stages)


def _receiving(send: Floats) -> tuple[Floats, Floats, Floats]:
    """The least and the most seconds to send to each device, (K,), and how many more at most whoever sends needs for
    the row's device than for the column's, (K, K).
    """
    k = send.shape[0]
    himself = np.eye(k, dtype=bool)
    least = np.where(himself, np.inf, send).min(0)
    most = np.where(himself, 0.0, send).max(0)
    more = np.where(himself[:, :, None] | himself[:, None, :], -np.inf, send[:, :, None] - send[:, None, :]).max(0)
    return least, most, np.where(np.isfinite(more), more, 0.0)


def _base(group: Ints, limit: float) -> Floats:
    """Offsets that keep the running maximum of one group out of the next one; `group` is sorted."""
    return np.cumsum(np.concatenate([[0], group[1:] != group[:-1]])) * (2.0 * limit)


def _twins(load: Floats, compute: Floats, room: Floats, send: Floats) -> list[tuple[int, int]]:
    """Devices that are alike in everything: each with the last one before it of its kind."""
    pairs = []
    for device in range(room.size):
        for other in reversed(range(device)):
            swapped = np.arange(room.size)
            swapped[[device, other]] = other, device
            same = (cost[device] == cost[other] for cost in (load, compute, room))
            if all(np.all(equal) for equal in same) and np.array_equal(send[np.ix_(swapped, swapped)], send):
                pairs.append((device, other))
                break
    return pairs

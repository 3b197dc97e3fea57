"""Is there a plan that is done by a given time? A search from the last stage to the first, level by level, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.prices import Bound
from edgellm.coldstart.tables import Tables
from edgellm.coldstart.task import Cut, Floats, Ints

TINY = 1e-11  # of the time limit: how much later than it a stage may be for want of exact sums
TIE = 1e-10
CHUNK = 200_000


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
        self.tables, task = tables, tables.task
        self.task, self.k, self.n = task, task.devices, task.layers
        self.paper = task.overlap == "paper"
        self.send = np.zeros((self.k, self.k + 1))  # to the device K, which stands behind the last stage, for nothing
        self.send[:, : self.k] = task.send
        off = np.where(np.eye(self.k, dtype=bool), np.inf, task.send)
        self.least_in = off.min(0) if self.k > 1 else np.full(1, np.inf)
        self.most_in = np.where(np.isinf(off), 0.0, off).max(0)
        # how much later x must be done for the row's head than for the column's, whoever x is
        both = np.where(np.isinf(off[:, :, None]) | np.isinf(off[:, None, :]), -np.inf, 0.0)
        self.later = np.maximum((task.send[:, :, None] - task.send[:, None, :] + both).max(0), -1e3 * 0.0 if self.k < 3 else -np.inf)
        own = tables.own.reshape(-1, self.n + 1)
        self.wide = 1.0 + 2.0 * float(own[np.isfinite(own)].max())
        keys = np.where(np.isfinite(own), own, self.wide * 0.75) + np.arange(own.shape[0])[:, None] * self.wide
        self.keys = keys.reshape(-1)
        self.compute, self.load = tables.compute.reshape(-1), tables.load.reshape(-1)
        self.twin = _twins(task.load, task.compute, task.room, task.send)

    def within(
        self, limit: float, bound: Bound, width: int | None, stop: Callable[[], bool]
    ) -> tuple[list[Cut], bool]:
        """Plans done by `limit`, some of them if there are any, and whether the search has looked everywhere."""
        one = np.zeros(1, dtype=np.int64)
        level = Labels(one, one + self.k, one + self.n, np.array([limit]), np.zeros(1), one, one)
        levels, whole = [level], True
        for depth in range(self.k):
            if stop():
                return [], False
            found, level = self._expanded(level, limit, bound)
            if found:
                return [self._plan(levels, *end) for end in found], False
            level = self._undominated(level, limit)
            if width is not None and len(level) > width:
                spare = bound(level.placed, level.head, level.rho) - level.left
                level = level.take(np.argpartition(-spare, width)[:width])
                whole = False
            if not len(level) or depth == self.k - 1:
                break
            levels.append(level)
        return [], whole

    def _expanded(self, labels: Labels, limit: float, bound: Bound) -> tuple[list[tuple[int, int, int]], Labels]:
        """One stage more before each label, of every device and size; and those that are whole plans."""
        everyone = np.arange(self.k)
        arrives = self.send[:, labels.head].T  # (labels, K): the sending behind the new stage
        due = labels.rho[:, None] - arrives  # when the new stage must be done
        free = (labels.placed[:, None] >> everyone & 1) == 0
        for device, other in self.twin:  # equal devices in the order of their numbers only
            free[:, device] &= (labels.placed >> other & 1) == 1
        if self.paper:
            free &= labels.load[:, None] <= due + TINY * limit
        free &= due > 0.0
        label, device = np.nonzero(free)
        left, due = labels.left[label], due[label, device]
        row = self.tables.row(device, left)
        most = np.searchsorted(self.keys, np.minimum(due + TINY * limit, 0.7 * self.wide) + row * self.wide, "right")
        most = most - 1 - row * (self.n + 1)
        if (ended := np.flatnonzero(most >= left)).size:
            best = ended[np.argsort(self.own_of(row[ended], left[ended]) - due[ended])[:4]]
            return [(int(label[at]), int(device[at]), int(left[at])) for at in best], labels
        parts = []
        for some in np.array_split(np.arange(label.size), 1 + int(most.sum()) // CHUNK):
            parts.append(self._sized(labels, limit, bound, label[some], device[some], left[some], due[some], most[some]))
        return [], Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in Labels.__slots__))

    def own_of(self, row: Ints, n: Ints) -> Floats:
        return self.keys[row * (self.n + 1) + n] - row * self.wide

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
        keep = np.flatnonzero(keep)
        count, at = count[keep], at[keep]
        return Labels(
            placed[keep], device_[keep], left_[keep] - count, rho[keep], self.load[at], label[which[keep]], count
        )

    def _undominated(self, labels: Labels, limit: float) -> Labels:
        """Without the labels that another one with the same devices makes needless.

        It does so if it leaves no more layers (any of its own could be given up: they are all alike; where they are
        not, exactly as many), and whatever device comes next may be done no earlier.
        """
        for across in (False, True):
            if len(labels) < 2:
                break
            labels = labels.take(self._best(labels, limit, across))
        return labels.take(self._pairwise(labels, limit)) if len(labels) > 1 else labels

    def _pairwise(self, labels: Labels, limit: float) -> np.ndarray:
        order = np.lexsort((labels.left, labels.placed))
        head, rho, placed, left = labels.head[order], labels.rho[order], labels.placed[order], labels.left[order]
        base = np.cumsum(np.concatenate([[0], placed[1:] != placed[:-1]])) * (2.0 * limit)
        fresh = np.concatenate([[True], (placed[1:] != placed[:-1]) | (left[1:] != left[:-1])])
        last = np.append(np.flatnonzero(fresh)[1:], len(labels))[np.cumsum(fresh) - 1] - 1
        offers = rho + base
        if self.paper:
            offers = np.where(labels.load[order] + self.most_in[head] <= rho, offers, base)
        asks = rho + base + TIE * limit
        beaten = np.zeros(len(labels), dtype=bool)
        for other in np.unique(head):
            best = np.maximum.accumulate(np.where(head == other, offers, base))[last]
            beaten |= best > asks + self.later[other, head]
        return order[~beaten]

    def _best(self, labels: Labels, limit: float, across: bool) -> np.ndarray:
        """Which labels to keep, compared within one head, or `across` heads at the worst sending against the best."""
        offers = asks = labels.rho
        if across:
            offers, asks = offers - self.most_in[labels.head], asks - self.least_in[labels.head]
        if self.paper:
            sure = labels.load + self.most_in[labels.head] <= labels.rho
            offers = np.where(sure, offers, 0.0)
        group = labels.placed if across else labels.placed * self.k + labels.head
        if self.tables.ends > 1:
            group = group * (self.n + 1) + labels.left
        order = np.lexsort((-offers, labels.left, group))
        group = group[order]
        base = np.cumsum(np.concatenate([[0], group[1:] != group[:-1]])) * (2.0 * limit)
        best = np.maximum.accumulate(base + np.maximum(offers[order], 0.0))
        beaten = np.concatenate([[False], best[:-1] >= base[1:] + asks[order][1:] - TIE * limit])
        return order[~beaten]

    def _plan(self, levels: list[Labels], label: int, device: int, count: int) -> Cut:
        """The way back from a whole plan, which is its way from the first stage to the last."""
        stages = [(device, count)]
        for level in reversed(levels[1:]):
            stages.append((int(level.head[label]), int(level.count[label])))
            label = int(level.parent[label])
        return tuple(stages)


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

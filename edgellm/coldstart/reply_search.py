"""The least time for a whole reply: the time to the first token, and n times that of each further token.

Beyond the paper. A wide split loads quickly and then decodes slowly, so that the plan for the first token need not be
the plan for the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.label_search import MOST
from edgellm.coldstart.problem import MARGIN, Cut, Floats, Ints, Solution, Stop, Task, fits, makespan, never, per_token
from edgellm.coldstart.warm_start import Tables

WIDTHS = (200, 5000, MOST)


def seconds(task: Task, cut: Cut, further: int) -> float:
    """Return the seconds until the last of `further` tokens after the first."""
    return makespan(task, cut) + further * per_token(task, cut)


def fastest_reply(task: Task, further: int, stop: Stop = never) -> Solution | None:
    """Return the plan whose whole reply ends first, with a lower bound; None if no plan fits.

    A search from the first stage to the last. A label is a partial plan: (first device, set placed, last device, layers
    done), the time t at which it is done, and the time D that it adds per further token. Of two labels that agree in
    the first four, (t, D) dominates (t', D') if D <= D' and t + n D <= t' + n D'.
    """
    search = _Forward(task, further)
    start = min(((seconds(task, cut, further), cut) for cut in _candidates(task, stop)), default=None)
    if start is None and (start := _find_any(search, stop)) is None:
        return None
    (high, best), low = start, search.floor()
    for width in WIDTHS:
        while True:
            cut, whole = search.within(high * (1.0 - MARGIN), width, stop)
            if cut is None:
                break
            high, best = min((high, best), (seconds(task, cut, further), cut))
        if whole:
            return Solution(best, high, high)
        if stop():
            break
    return Solution(best, high, min(low, high))


def _find_any(search: _Forward, stop: Stop) -> tuple[float, Cut] | None:
    """Return any plan with its seconds; None if there is none, or it is not found in time. The first pass is short."""
    task, further = search.task, search.further
    late = 1.0 + float(
        task.opening.sum() + task.load.sum() + task.compute.sum() + task.send.sum() + task.alone_load.sum()
    )
    late += further * float(task.step.sum() + task.hop.sum())
    for width in WIDTHS:
        cut, whole = search.within(late, width, never if width == WIDTHS[0] else stop)
        if cut is not None:
            return seconds(task, cut, further), cut
        if whole or stop():
            break
    return None


def _candidates(task: Task, stop: Stop) -> Iterator[Cut]:
    """Yield the single devices, and the plans with the fastest first token on the few devices that decode best."""
    yield from (cut for device in range(task.devices) if fits(task, cut := ((device, task.layers),)))
    if task.bounded:
        return
    order = np.argsort(task.step.sum(1), kind="stable")
    for many in range(2, task.devices + 1):
        chosen = np.sort(order[:many])
        if (found := fastest_first_token(_among(task, chosen), stop)) is not None:
            yield tuple((int(chosen[device]), count) for device, count in found.cut)
        if stop():
            return


def _among(task: Task, chosen: Ints) -> Task:
    rows, pairs = ("load", "compute", "step", "capacity", "alone_load", "begins", "ends", "opening"), ("send", "hop")
    some = {name: getattr(task, name)[chosen] for name in rows}
    return replace(task, **some, **{name: getattr(task, name)[np.ix_(chosen, chosen)] for name in pairs})


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    first: Ints
    placed: Ints
    last: Ints
    done: Ints
    t: Floats
    d: Floats
    parent: Ints
    count: Ints

    def __len__(self) -> int:
        return self.placed.size

    def take(self, which: Ints) -> _Labels:
        return _Labels(*(getattr(self, name)[which] for name in self.__slots__))


class _Forward:
    def __init__(self, task: Task, further: int) -> None:
        self.task, self.further, self.k, self.n = task, further, task.devices, task.layers
        self.tables = Tables(task)
        self.own, self.compute = self.tables.own.reshape(-1), self.tables.compute.reshape(-1)
        self.steps = np.concatenate([np.zeros((self.k, 1)), np.cumsum(task.step, 1)], 1)
        others = ~np.eye(self.k, dtype=bool)
        self.hop = float(task.hop[others].min()) if self.k > 1 else 0.0
        self.rest = self._rest()

    def _rest(self) -> Floats:
        """Return the least time to compute the layers after the first j and decode n times with them, (2^K, L + 1).

        The rows are masks of placed devices. Each other device takes as many layers as it can hold, the cheapest device
        first, each layer at its least cost there; and every further device that is needed adds a hop.
        """
        task, layers = self.task, np.arange(self.n + 1)
        cost = (task.compute + self.further * task.step).min(1)
        holds = self.tables.most.reshape(self.k, -1).max(1)
        order = np.argsort(cost, kind="stable")
        found = np.full((1 << self.k, self.n + 1), np.inf)
        for mask in range(1 << self.k):
            free = [device for device in order.tolist() if not mask >> device & 1]
            filled = np.minimum(np.cumsum([0, *holds[free]]), self.n)
            paid = np.cumsum([0.0, *(np.diff(filled) * cost[free])])
            many = np.cumsum([0, *sorted(holds[free].tolist(), reverse=True)])
            stages = np.searchsorted(many, layers)  # devices needed for each number of layers
            top = np.interp(layers, filled, paid) + self.further * self.hop * stages
            found[mask] = np.where(layers <= filled[-1], top, np.inf)[::-1]  # by the layers that are done
        return found

    def floor(self) -> float:
        """Return a lower bound on the seconds of the whole reply."""
        return float(self.rest[0, 0]) - self.further * self.hop

    def within(self, limit: float, width: int, stop: Stop) -> tuple[Cut | None, bool]:
        """Return a plan whose reply takes no longer than `limit`, if found, and whether the search was exhaustive."""
        all_devices = np.arange(self.k)
        empty = np.zeros(0, dtype=np.int64)
        levels: list[_Labels] = []
        level, whole = self._begun(limit), True
        for _ in range(self.k):
            ends = np.flatnonzero(level.done == self.n)
            if ends.size:
                total = level.t[ends] + self.further * (level.d[ends] + self._back(level)[ends])
                if total.min() <= limit:
                    return self._plan(levels, level, int(ends[total.argmin()])), False
            level = self._undominated(level.take(np.flatnonzero(level.done < self.n)))
            if len(level) > width:
                value = level.t + self.further * level.d + self.rest[level.placed, level.done]
                level, whole = level.take(np.argpartition(value, width)[:width]), False
            if not len(level) or stop():
                return None, whole and not len(level)
            levels.append(level)
            label, device = np.nonzero((level.placed[:, None] >> all_devices & 1) == 0)
            steps_made = [self._sized(level, label[device == at], at, limit) for at in range(self.k)]
            level = _Labels(*(np.concatenate([empty, *(getattr(m, f) for m in steps_made)]) for f in _Labels.__slots__))
        return None, whole

    def _begun(self, limit: float) -> _Labels:
        """Return the labels of a first stage of every device and size."""
        no_device = np.zeros(self.k, dtype=np.int64)
        none = np.zeros(self.k)
        first = np.arange(self.k)
        start = _Labels(first, no_device, first, no_device, none, none, no_device, no_device)
        steps_made = [self._sized(start, np.array([at]), at, limit, first=True) for at in range(self.k)]
        return _Labels(*(np.concatenate([getattr(m, f) for m in steps_made]) for f in _Labels.__slots__))

    def _sized(self, labels: _Labels, label: Ints, device: int, limit: float, first: bool = False) -> _Labels:
        """Return the labels with a stage of `device`, of every size, after each of the given ones."""
        label, count = (grid.reshape(-1) for grid in np.meshgrid(label, np.arange(1, self.n + 1), indexing="ij"))
        fit = labels.done[label] + count <= self.n
        label, count = label[fit], count[fit]
        end = labels.done[label] + count
        at = self.tables.row(np.full(label.size, device), end) * (self.n + 1) + count
        sender, before = labels.last[label], labels.t[label]
        own, compute = self.own[at], self.compute[at]
        send = 0.0 if first else self.task.send[sender, device]
        with np.errstate(invalid="ignore"):
            if self.task.overlap == "paper":
                t = np.maximum(own, before + compute) + send
            else:
                t = np.maximum(own, before + send + compute)
        hop = 0.0 if first else self.task.hop[sender, device]
        d = labels.d[label] + hop + self.steps[device, end] - self.steps[device, end - count]
        placed = labels.placed[label] | 1 << device
        back = 0.0 if first else self.further * self.hop
        keep = np.flatnonzero(t + self.further * d + self.rest[placed, end] + back <= limit)
        placed = placed[keep]
        label = label[keep]
        origin = np.full(keep.size, device) if first else labels.first[label]
        return _Labels(origin, placed, np.full(keep.size, device), end[keep], t[keep], d[keep], label, count[keep])

    def _back(self, labels: _Labels) -> Floats:
        """Return the seconds of the chosen token's hop from the last device to the first."""
        return np.where(labels.first == labels.last, 0.0, self.task.hop[labels.last, labels.first])

    def _undominated(self, labels: _Labels) -> _Labels:
        if len(labels) < 2:
            return labels
        value = labels.t + self.further * labels.d
        group = ((labels.placed * self.k + labels.first) * self.k + labels.last) * (self.n + 1) + labels.done
        order = np.lexsort((value, labels.d, group))
        group, value = group[order], value[order]
        fresh = np.concatenate([[0], group[1:] != group[:-1]])
        base = np.cumsum(fresh) * (-2.0 * float(value.max() + 1.0))
        best = np.minimum.accumulate(base + value)  # among those that take no more per token
        beaten = best[:-1] <= (base + value)[1:]
        return labels.take(order[np.concatenate([[True], ~beaten])])

    def _plan(self, levels: list[_Labels], labels: _Labels, at: int) -> Cut:
        stages = []
        for level in (labels, *reversed(levels)):
            stages.append((int(level.last[at]), int(level.count[at])))
            at = int(level.parent[at])
        return tuple(reversed(stages))

"""The least time for a whole reply: the time to the first token, and n times that of each further token.

Beyond the paper. A wide split loads quickly and then decodes slowly, so that the plan for the first token need not be
the plan for the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.bounds import Tables
from edgellm.coldstart.exact_search import CHUNK, MOST, fastest_first_token
from edgellm.coldstart.problem import MARGIN, Cut, Floats, Ints, Solution, Stop, Task, fits, makespan, never, per_token

WIDTHS = (200, 5000, MOST)
"""Labels that a pass follows, as in the search for the first token."""


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
    """Yield the single devices that fit, and the plan with the fastest first token."""
    yield from (cut for device in range(task.devices) if fits(task, cut := ((device, task.layers),)))
    if not task.bounded and (found := fastest_first_token(task, stop)) is not None:
        yield found.cut


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
    """The search for one task; `within` runs it for a time limit. Before the first stage is device K, at no cost."""

    def __init__(self, task: Task, further: int) -> None:
        self.task, self.further, self.k, self.n = task, further, task.devices, task.layers
        self.tables = Tables(task)
        self.own, self.compute = self.tables.own.reshape(-1), self.tables.compute.reshape(-1)
        self.steps = np.concatenate([np.zeros((self.k, 1)), np.cumsum(task.step, 1)], 1)
        self.send, self.hops = (np.vstack([cost, np.zeros(self.k)]) for cost in (task.send, task.hop))
        others = ~np.eye(self.k, dtype=bool)
        self.hop = float(task.hop[others].min()) if self.k > 1 else 0.0
        self._known = np.full(1 << self.k, -1)  # index of the bounds for each mask; -1: none
        self._bounds = np.zeros((0, self.n + 1))

    def remaining(self, placed: Ints, done: Ints) -> Floats:
        """Bound the time to compute the layers after the first `done`, and to decode n times with them, on devices that
        are not `placed`, from below."""
        masks = np.unique(placed)
        masks = masks[self._known[masks] < 0]
        if masks.size:
            self._known[masks] = len(self._bounds) + np.arange(masks.size)
            self._bounds = np.concatenate([self._bounds, self._bounded(masks)])
        found: Floats = self._bounds[self._known[placed], done]
        return found

    def _bounded(self, masks: Ints) -> Floats:
        """Return `remaining` for masks of placed devices and each number of layers that are done, (m, L + 1).

        Each other device takes as many layers as it can hold, the cheapest device first, each layer at its least cost
        there; and every further device that is needed adds a hop.
        """
        cost = (self.task.compute + self.further * self.task.step).min(1)
        holds = self.tables.most.reshape(self.k, -1).max(1)
        layers = self.n - np.arange(self.n + 1)
        free = np.where(masks[:, None] >> np.arange(self.k) & 1, 0, holds)
        found = np.zeros((masks.size, self.n + 1))
        for order, price in ((np.argsort(cost, kind="stable"), cost), (np.argsort(-holds, kind="stable"), None)):
            before = np.zeros(masks.size, dtype=np.int64)
            for device in order:
                left = layers - before[:, None]
                if price is None:
                    found += self.further * self.hop * ((left > 0) & (free[:, device, None] > 0))
                else:
                    found += price[device] * np.clip(left, 0, free[:, device, None])
                before += free[:, device]
        return np.where(layers <= free.sum(1)[:, None], found, np.inf)

    def floor(self) -> float:
        """Return a lower bound on the seconds of the whole reply."""
        none = np.zeros(1, dtype=np.int64)
        return float(self.remaining(none, none)[0]) - self.further * self.hop

    def within(self, limit: float, width: int, stop: Stop) -> tuple[Cut | None, bool]:
        """Return a plan whose reply takes no longer than `limit`, if found, and whether the search was exhaustive."""
        none, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
        level, whole = _Labels(none, none, none + self.k, none, zero, zero, none, none), True
        levels: list[_Labels] = []
        for _ in range(self.k):
            levels.append(level)
            free = (level.placed[:, None] >> np.arange(self.k) & 1) == 0
            made: list[_Labels] = []
            for device in range(self.k):
                some = np.flatnonzero(free[:, device])
                for part in np.array_split(some, 1 + some.size // CHUNK):
                    if stop():
                        return None, False
                    made.append(self._sized(level, part, device, limit))
            level = _Labels(*(np.concatenate([getattr(one, name) for one in made]) for name in _Labels.__slots__))
            ends = np.flatnonzero(level.done == self.n)
            if ends.size:
                total = level.t[ends] + self.further * (level.d[ends] + self._back(level)[ends])
                if total.min() <= limit:
                    return self._plan(levels, level, int(ends[total.argmin()])), False
            level = self._undominated(level.take(np.flatnonzero(level.done < self.n)))
            if len(level) > width:
                value = level.t + self.further * level.d + self.remaining(level.placed, level.done)
                level, whole = level.take(np.argpartition(value, width)[:width]), False
            if not len(level):
                return None, whole
        return None, whole

    def _sized(self, labels: _Labels, some: Ints, device: int, limit: float) -> _Labels:
        """Return the labels with a stage of `device`, of every size, after some of the given ones."""
        label, count = (grid.reshape(-1) for grid in np.meshgrid(some, np.arange(1, self.n + 1), indexing="ij"))
        fit = labels.done[label] + count <= self.n
        label, count = label[fit], count[fit]
        end = labels.done[label] + count
        at = self.tables.row(np.full(label.size, device), end) * (self.n + 1) + count
        sender, before = labels.last[label], labels.t[label]
        send, own, compute = self.send[sender, device], self.own[at], self.compute[at]
        with np.errstate(invalid="ignore"):
            if self.task.overlap == "paper":
                t = np.maximum(own, before + compute) + send
            else:
                t = np.maximum(own, before + send + compute)
        d = labels.d[label] + self.hops[sender, device] + self.steps[device, end] - self.steps[device, end - count]
        placed = labels.placed[label] | 1 << device
        back = np.where(sender == self.k, 0.0, self.further * self.hop)
        keep = np.flatnonzero(t + self.further * d + self.remaining(placed, end) + back <= limit)
        placed, label, sender = placed[keep], label[keep], sender[keep]
        first = np.where(sender == self.k, device, labels.first[label])
        return _Labels(first, placed, np.full(keep.size, device), end[keep], t[keep], d[keep], label, count[keep])

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
        best = np.minimum.accumulate(base + value)  # least among labels that take no more per token
        beaten = best[:-1] <= (base + value)[1:]
        return labels.take(order[np.concatenate([[True], ~beaten])])

    def _plan(self, levels: list[_Labels], labels: _Labels, at: int) -> Cut:
        stages = []
        for level in (labels, *reversed(levels[1:])):
            stages.append((int(level.last[at]), int(level.count[at])))
            at = int(level.parent[at])
        return tuple(reversed(stages))

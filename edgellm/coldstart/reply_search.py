"""The least time for a whole reply: the time to the first token, and n times that of each further token.

Beyond the paper. A wide split loads quickly and then decodes slowly, so that the plan for the first token need not be
the plan for the reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from edgellm.coldstart.costs import Floats
from edgellm.coldstart.exact_search import Tables, fastest_first_token, single_devices
from edgellm.coldstart.problem import MARGIN, Cut, Ints, Solution, Stop, Task, makespan, never, per_token

WIDTHS = (100, 1000, 10_000, 2_000_000)
"""Labels that a pass follows: narrow passes find good plans, the last pass looks everywhere."""
CHUNK = 8_192  # labels expanded at once: the results stay in the processor's cache


def seconds(task: Task, further: int, cut: Cut) -> float:
    """Return the seconds until the last of `further` tokens after the first."""
    return makespan(task, cut) + further * per_token(task, cut)


def fastest_reply(task: Task, further: int, stop: Stop = never) -> Solution | None:
    """Return the plan whose whole reply ends first, with a lower bound; None if no plan fits.

    A search from the first stage to the last. A label is a partial plan: (first device, set placed, last device, layers
    done), the time t at which it is done, and the time D that it adds per further token. Of two labels that agree in
    the first four, (t, D) dominates (t', D') if D <= D' and t + n D <= t' + n D'. Passes search for a plan better than
    the best known plan, which it replaces. If there is none and a search was exhaustive, the best known one is optimal.
    """
    if (found := fastest_first_token(task, stop)) is None:
        return None
    search = _Forward(task, further)
    high, best = min((seconds(task, further, cut), cut) for cut in (found.cut, *single_devices(task)))
    for width in WIDTHS:
        cuts, whole = [best], False
        while cuts:
            # The first passes are short, and without them no plan is good.
            cuts, whole = search.within(high * (1.0 - MARGIN), width, never if width == WIDTHS[0] else stop)
            high, best = min(((seconds(task, further, cut), cut) for cut in cuts), default=(high, best))
        if whole:
            return Solution(best, high, high)
    least = max(found.floor + further * float(task.step.min(0).sum()), float(search.remaining(0)[0]))
    return Solution(best, high, min(high, least))


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial plans, as above, as arrays of one length; `least` are the seconds of the whole reply, at least."""

    placed: Ints
    first: Ints
    last: Ints
    done: Ints
    t: Floats
    d: Floats
    least: Floats
    parent: Ints
    count: Ints

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(self.placed)

    def take(self, which: Ints) -> Self:
        return type(self)(*(getattr(self, name)[which] for name in self.__slots__))


class _Forward:
    """The search for one task; `within` runs it for a time limit. Before the first stage is device K, at no cost."""

    def __init__(self, task: Task, further: int) -> None:
        self.task, self.further, self.k, self.n = task, further, task.devices, task.layers
        self.tables = Tables.of(task)
        self.steps = np.concatenate([np.zeros((self.k, 1)), np.cumsum(task.step, 1)], 1)
        self.send, self.hops = (np.vstack([cost, np.zeros(self.k)]) for cost in (task.send, task.hop))
        others = ~np.eye(self.k, dtype=bool)
        self.hop = float(task.hop[others].min()) if self.k > 1 else 0.0
        self.cheapest = (task.compute + further * task.step).min(1)  # seconds of a layer, at least
        self.holds = np.where(np.isfinite(self.tables.own), np.arange(self.n + 1), 0).max((1, 2))
        self._remaining: dict[int, Floats] = {}

    def remaining(self, placed: int) -> Floats:
        """Bound the time to compute the layers after the first n, and to decode with them, on devices that are not
        `placed`, from below, (L + 1,).

        Each other device takes as many layers as it can hold, the cheapest device first, each layer at its least cost
        there; and every further device that is needed adds a hop.
        """
        if placed not in self._remaining:
            free = [device for device in range(self.k) if not placed >> device & 1]
            layers = self.n - np.arange(self.n + 1)
            left, found = layers.copy(), np.zeros(self.n + 1)
            for device in sorted(free, key=self.cheapest.__getitem__):
                found += self.cheapest[device] * np.minimum(left, self.holds[device])
                left = np.maximum(left - self.holds[device], 0)
            rooms = np.cumsum(np.sort(self.holds[free])[::-1])
            found += self.further * self.hop * np.where(layers > 0, 1 + np.searchsorted(rooms, layers), 0)
            self._remaining[placed] = np.where(left > 0, np.inf, found)
        return self._remaining[placed]

    def within(self, limit: float, width: int, stop: Stop) -> tuple[list[Cut], bool]:
        """Return some plans whose replies take no longer than `limit`, if there are any, and whether the search was
        exhaustive. Only the `width` most promising labels of each level are followed. Return early once `stop` is
        true."""
        none, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
        level, whole = _Labels(none, none, none + self.k, none, zero, zero, zero, none, none), True
        levels: list[_Labels] = []
        while len(level):
            levels.append(level)
            parts = []
            for some in np.array_split(np.arange(len(level)), 1 + len(level) * self.k * self.n // CHUNK):
                if stop():
                    return [], False
                parts.append(self._extended(level, some, limit))
            level = _Labels.joined(parts)
            ends = np.flatnonzero(level.done == self.n)
            if ends.size:
                return [self._plan(levels, level, int(end)) for end in ends[np.argsort(level.least[ends])[:4]]], False
            level = self._undominated(level)
            if len(level) > width:
                level, whole = level.take(np.argpartition(level.least, width)[:width]), False
        return [], whole

    def _extended(self, labels: _Labels, some: Ints, limit: float) -> _Labels:
        """Return the labels with one more stage after `some`, of each device and every size."""
        task, further = self.task, self.further
        free = (labels.placed[some, None] >> np.arange(self.k) & 1) == 0
        at, device = np.nonzero(free)
        at = some[at]
        left = self.n - labels.done[at]
        which = np.repeat(np.arange(at.size), left)
        count = np.arange(1, which.size + 1) - np.repeat(np.cumsum(left) - left, left)
        label, device = at[which], device[which]
        end, sender, before = labels.done[label] + count, labels.last[label], labels.t[label]
        send, own, compute = (
            self.send[sender, device], self.tables.own[device, end, count], self.tables.compute[device, end, count]
        )  # fmt: skip
        if task.overlap == "paper":
            t = np.maximum(own, before + compute) + send
        else:
            t = np.maximum(own, before + send + compute)
        d = labels.d[label] + self.hops[sender, device] + self.steps[device, end] - self.steps[device, end - count]
        first = np.where(sender == self.k, device, labels.first[label])
        placed = labels.placed[label] | 1 << device
        masks, mask = np.unique(placed, return_inverse=True)
        rest = np.array([self.remaining(int(one)) for one in masks])[mask, end]
        back = np.where(end == self.n, np.where(first == device, 0.0, task.hop[device, first]), self.hop)
        least = t + further * (d + back) + rest
        kept = np.flatnonzero(least <= limit)
        return _Labels(placed, first, device, end, t, d, least, label, count).take(kept)

    def _undominated(self, labels: _Labels) -> _Labels:
        if len(labels) < 2:
            return labels
        value = labels.t + self.further * labels.d
        group = ((labels.placed * self.k + labels.first) * self.k + labels.last) * (self.n + 1) + labels.done
        order = np.lexsort((value, labels.d, group))
        group, value = group[order], value[order]
        fresh = np.diff(group, prepend=-1) != 0
        base = np.cumsum(fresh) * (-2.0 * float(value.max() + 1.0))
        best = np.minimum.accumulate(base + value)  # least among labels that take no more per token
        return labels.take(order[np.append(True, best[:-1] > (base + value)[1:])])

    def _plan(self, levels: Sequence[_Labels], labels: _Labels, at: int) -> Cut:
        stages = []
        for level in (labels, *reversed(levels[1:])):
            stages.append((int(level.last[at]), int(level.count[at])))
            at = int(level.parent[at])
        return tuple(reversed(stages))

"""The exact planner: the least time to the first token, and the proof that no plan is faster.

CSGO's Algorithm 1, a dynamic programme over sets of devices, in numpy: plans of one stage, then of two, and so on. Of
all plans that have the first n layers on the same devices, and the last of them on the same one, only the soonest can
become the best plan; and none can that would be later than the best known one if all further layers were loaded.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from edgellm.coldstart.costs import Floats
from edgellm.coldstart.problem import MARGIN, Cut, Ints, Solution, Stop, Task, fits, makespan, never

CHUNK = 2**17  # moments computed at once: they stay in the processor's cache
ROOMS = (CHUNK // 8, CHUNK, 16 * CHUNK)
"""Most moments kept of the plans of a number of stages, by search. Where the last one drops sets of devices, as of some
fifteen devices on, nothing is proved."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The stages of a task by device, `end` after the last layer, and number of layers n, (K, L + 1, L + 1) each;
    infinite where there is none.

    `compute`: seconds of a stage's work. `own`: seconds that it takes alone, infinite where it does not fit or may not
    begin or end. A stage whose work may begin at s is done at `max(s + compute, own)`, in all timing models (in `paper`
    s is when it may receive, and the sending comes behind).
    """

    task: Task
    own: Floats
    compute: Floats

    @classmethod
    def of(cls, task: Task) -> "Tables":
        k, n = task.load.shape
        end = np.arange(n + 1)[:, None]
        first = end - np.arange(n + 1)

        def spans(sums: Floats) -> Floats:
            return np.where(first >= 0, sums[:, end] - sums[:, first], np.inf)

        there = np.isfinite(task.load)
        costs = (np.where(there, task.load, 0.0), task.compute, np.tile(task.need, (k, 1)), ~there)
        loads, works, needs, lacking = map(_sums, costs)
        compute, own = spans(works), spans(loads) + spans(works) + task.opening[:, None, None]
        if task.overlap == "streamed":
            file_ends = np.append(np.flatnonzero(task.files[1:]) + 1, n)[np.cumsum(np.append(False, task.files[1:]))]
            for at in range(1, n + 1):  # The latest of: a layer's file is loaded, and all from it on are computed.
                done = loads[:, np.minimum(file_ends[:at], at)] + works[:, at : at + 1] - works[:, :at]
                latest = np.maximum.accumulate(done[:, ::-1], 1) - loads[:, at - 1 :: -1] + task.opening[:, None]
                own[:, at, 1 : at + 1] = np.maximum(latest, compute[:, at, 1 : at + 1])
        fits = (spans(needs) <= task.room[:, None, None]) & (spans(lacking) == 0)
        nowhere = np.zeros((k, 1), bool)
        fits &= np.append(task.begins, nowhere, 1)[:, first] & np.append(nowhere, task.ends, 1)[:, end]
        own = np.where(fits, own, np.inf)
        own[:, :, 0] = 0.0
        return cls(task, own, compute)


def _sums(cost: Floats) -> Floats:
    """Return the sums of each device's first n layers, (K, L + 1)."""
    return np.concatenate([np.zeros((len(cost), 1)), np.cumsum(cost, 1)], 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """The plans of some number of stages for the first layers: the `sets` of their devices, as ascending masks, (M,);
    and when they are `done`, by the device of the last stage and the number of layers, (M, K, L + 1), infinite where
    there is no plan."""

    sets: Ints
    done: Floats


def fastest_first_token(task: Task, stop: Stop = never) -> Solution | None:
    """Return the plan of least T (equation 23), with a lower bound; None if the devices together cannot hold the
    layers. Narrow searches find a good plan, below which the last one looks everywhere, unless `stop`, polled between
    numbers of stages, returns True."""
    tables = Tables.of(task)
    most = comb(task.devices, task.devices // 2) * task.devices * (task.layers + 1)
    best = min(((makespan(task, cut), cut) for cut in single_devices(task)), default=(np.inf, ()))
    for room in ROOMS if most > ROOMS[-1] else (ROOMS[0], ROOMS[-1]):
        best, whole = _searched(tables, best, room, never if room == ROOMS[0] else stop)
        if whole:
            break
    high, cut = best
    return Solution(cut, high, high if whole else min(high, _floor(tables))) if cut else None


def _searched(tables: Tables, best: tuple[float, Cut], room: int, stop: Stop) -> tuple[tuple[float, Cut], bool]:
    """Return the best plan that keeps at most `room` moments of a number of stages, or `best` if none is better; and
    whether no other plan can be."""
    task, k, n = tables.task, tables.task.devices, tables.task.layers
    rest = np.append(np.cumsum(task.compute.min(0)[::-1])[::-1], 0.0)  # least seconds behind the first n layers
    alone = np.full((k, k, n + 1), np.inf)
    alone[range(k), range(k), 1:] = tables.own[:, range(1, n + 1), range(1, n + 1)]
    level, levels, whole = _Level(1 << np.arange(k), alone), list[_Level](), True
    while len(level.sets):
        if (soonest := float(level.done[:, :, n].min())) < best[0] * (1.0 - MARGIN):
            best = soonest, _traced(tables, levels, level)
        limit = best[0] * (1.0 - MARGIN)
        most = np.where(tables.own.min(1) <= limit, np.arange(n + 1), 0).max(1)  # layers that a device has done by then
        left = most.sum() - (level.sets[:, None] >> np.arange(k) & 1) @ most
        hopeless = (level.done + rest > limit) | (np.arange(n + 1) < n - left[:, None])[:, None]
        promise = np.where(hopeless, np.inf, level.done + rest).min((1, 2))
        kept = np.flatnonzero(np.isfinite(promise))
        if len(kept) > room // (k * (n + 1)):
            kept, whole = np.sort(np.argsort(promise)[: max(1, room // (k * (n + 1)))]), False
        if best[1] and stop():  # without a plan it would seem that none fits
            return best, False
        levels.append(_Level(level.sets[kept], np.where(hopeless[kept], np.inf, level.done[kept])))
        level = _longer(tables, levels[-1])
    return best, whole


def single_devices(task: Task) -> Iterator[Cut]:
    """Yield the plans with all layers on one device."""
    yield from (cut for device in range(task.devices) if fits(task, cut := ((device, task.layers),)))


def _longer(tables: Tables, level: _Level) -> _Level:
    """Return the plans of a level with one more stage."""
    task, n = tables.task, tables.task.layers
    rows = [np.flatnonzero(level.sets >> device & 1 == 0) for device in range(task.devices)]
    wider = [level.sets[row] | 1 << device for device, row in enumerate(rows)]
    sets = np.unique(np.concatenate(wider))
    done, sizes = np.full((len(sets), task.devices, n + 1), np.inf), np.arange(1, n + 1)
    first = np.arange(n + 1)[:, None] - sizes  # before a stage that ends there, of this size; below 0 it is infinite
    for device, row in enumerate(rows):
        arrive, sending = _arrivals(task, level.done[row], device)
        if task.overlap != "paper":  # then the sender does not matter any more
            arrive, sending = arrive.min(1, keepdims=True), sending[:1]
        own, compute = tables.own[device, :, 1:], tables.compute[device, :, 1:]
        to = np.searchsorted(sets, wider[device])
        for at in np.array_split(np.arange(len(row)), 1 + arrive.size * n // CHUNK):
            ends = np.maximum(own, arrive[at][:, :, first] + compute).min(3)
            done[to[at], device] = (ends + sending[:, None]).min(1)
    return _Level(sets, done)


def _arrivals(task: Task, done: Floats, device: int) -> tuple[Floats, Floats]:
    """Return when `device` may begin the work behind plans that are `done`, (M, K, L + 1), by the sender; and the
    seconds of sending, (K,), that are still to be added, as in the paper it receives only once it has loaded."""
    send = task.send[:, device]
    return (done, send) if task.overlap == "paper" else (done + send[:, None], np.zeros_like(send))


def _traced(tables: Tables, levels: Sequence[_Level], last: _Level) -> Cut:
    """Return the soonest whole plan of the `last` level, of which `levels` are the levels before."""
    end, cut, sizes = tables.task.layers, list[tuple[int, int]](), np.arange(1, tables.task.layers + 1)
    at, device = divmod(int(last.done[:, :, end].argmin()), tables.task.devices)
    devices = int(last.sets[at])
    for level in reversed(levels):
        devices ^= 1 << device
        done = level.done[np.searchsorted(level.sets, devices)]
        arrive, sending = _arrivals(tables.task, done, device)
        ends = np.maximum(tables.own[device, end, 1:], arrive[:, end - sizes] + tables.compute[device, end, 1:])
        sender, size = divmod(int((ends + sending[:, None]).argmin()), len(sizes))
        cut.append((device, size + 1))
        device, end = sender, end - size - 1
    return ((device, end), *reversed(cut))


def _floor(tables: Tables) -> float:
    """Return a time that no plan is below: enough layers are done by then, each computed where it takes least."""
    n, alone = tables.task.layers, tables.own.min(1)
    moments = np.unique(alone[np.isfinite(alone)])

    def enough(moment: float) -> bool:
        return int(np.where(alone <= moment, np.arange(n + 1), 0).max(1).sum()) >= n

    return max(float(moments[bisect_left(moments, True, key=enough)]), float(tables.task.compute.min(0).sum()))

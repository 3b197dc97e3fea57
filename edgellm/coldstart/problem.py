"""The planning problem: times and sizes by layer and device, and the times of a given split (CSGO, equations 17-24)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgellm.layer_range import LayerRange

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Overlap = Literal["paper", "receiving", "streamed"]
"""Work that a device can do while it loads: nothing (equation 18); receive; receive, and compute with the layers loaded
so far."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """L layers for K devices, in seconds and bytes.

    `load` and `compute`, (K, L): seconds for one layer on one device. `send`, (K, K): seconds from the row's device to
    the column's. `need`, (L,): bytes of a layer in memory; `capacity`, (K,): bytes that a device has for layers.
    Embedding and head belong to the first and the last layer.

    `step`, (K, L), and `hop`, (K, K): `compute` and `send` for one decoded token. `alone_load`, (K,), and `alone_need`:
    seconds and bytes for all layers on one device, at most their sum (a head tied to the embedding is stored once).
    `begins` and `ends`, (K, L): whether a stage of the device may begin or end with the layer. `files`, (L,): whether a
    file begins with the layer, as a device computes no layer before it has loaded all of the file that are its own.
    `opening`, (K,): seconds before the device begins to load.
    """

    load: Floats
    compute: Floats
    send: Floats
    need: Floats
    capacity: Floats
    overlap: Overlap
    step: Floats
    hop: Floats
    alone_load: Floats
    alone_need: float
    begins: Bools
    ends: Bools
    files: Bools
    opening: Floats

    @property
    def devices(self) -> int:
        return int(self.load.shape[0])

    @property
    def layers(self) -> int:
        return int(self.load.shape[1])

    @property
    def room(self) -> Floats:
        """Return `capacity`, with so much more that rounding does not make a stage too big that just fits, (K,)."""
        return self.capacity * (1.0 + 1e-12)

    @property
    def bounded(self) -> bool:
        """Return whether `begins` or `ends` restrict any stage."""
        return not (self.begins.all() and self.ends.all())

    def longest(self, further: int = 0) -> float:
        """Return seconds by which every plan is done with the first token and `further` ones."""
        once = (self.opening, self.load, self.alone_load, self.compute, self.send)
        return 1.0 + float(sum(cost.sum() for cost in once) + further * (self.step.sum() + self.hop.sum()))


Cut = tuple[tuple[int, int], ...]
"""A plan in short: (device, layers) of every stage, first to last."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage, in seconds from the request (equations 17-21, 24).

    The stage holds `layers`, loads until `load`, has its input at `received`, after a transfer of `network` seconds,
    and is done at `finish`; `compute` is the work alone. `wait` is the idle time between its own load and its
    predecessor's output (equation 24).
    """

    device: int
    layers: LayerRange
    load: float
    wait: float
    network: float
    received: float
    compute: float
    finish: float


def timeline(task: Task, cut: Cut) -> tuple[StageTimes, ...]:
    """Return the times of each stage; the only place where they are computed. `cut` covers the layers in order."""
    spans: list[StageTimes] = []
    first, before, sender = 0, 0.0, None
    for device, count in cut:
        loads = task.load[device, first : first + count]
        opening = float(task.opening[device])
        load = opening + float(task.alone_load[device] if len(cut) == 1 else loads.sum())
        work = task.compute[device, first : first + count]
        compute = float(work.sum())
        network = 0.0 if sender is None else float(task.send[sender, device])
        if task.overlap == "paper":
            received = max(load, before) + network  # eq. 17, 18: it receives only after its own load
            finish = received + compute
        else:
            received = before + network
            files = task.files[first : first + count]
            own = load + compute if task.overlap == "receiving" else streamed(loads, work, load, files, opening)
            finish = max(received + compute, own)
        layers, wait = LayerRange(first, first + count), max(0.0, before - load)
        spans.append(StageTimes(device, layers, load, wait, network, received, compute, finish))
        first, before, sender = first + count, finish, device
    return tuple(spans)


def streamed(load: Floats, compute: Floats, whole: float, files: Bools, opening: float = 0.0) -> float:
    """Return when a device is done that computes each layer once its file is loaded and the previous layers are
    computed. `files` as for `Task`.

    Loading is serial: a layer is loaded after all loads up to the end of its file, and then it and all later layers are
    computed. They begin after `opening` seconds, and are over after `whole`.
    """
    loaded = np.minimum(opening + np.cumsum(load)[last_of_file(files)], whole)
    remaining = np.cumsum(compute[::-1])[::-1]
    return float((loaded + remaining).max())


def last_of_file(files: Bools) -> Ints:
    """Return for each layer of a stage the stage's last layer in the same file, (n,); `files`, (n,), as for `Task`."""
    begins = files[1:]
    last = np.append(np.flatnonzero(begins), len(files) - 1)
    found: Ints = last[np.concatenate([[0], np.cumsum(begins)])]
    return found


def makespan(task: Task, cut: Cut) -> float:
    """Return T of equation 23: when the last stage is done."""
    return timeline(task, cut)[-1].finish


def per_token(task: Task, cut: Cut) -> float:
    """Return the seconds per decoded token: all stages and hops, including the hop back to the first stage."""
    first, total = 0, 0.0
    for at, (device, count) in enumerate(cut):
        total += float(task.step[device, first : first + count].sum())
        if len(cut) > 1:
            total += float(task.hop[cut[at - 1][0], device])  # at 0, the hop back to the first stage
        first += count
    return total


def fits(task: Task, cut: Cut) -> bool:
    """Return whether each stage fits its device's memory (equation 22), begins and ends where it may, with no device
    used twice and no layer left."""
    first = 0
    for device, count in cut:
        needed = task.need[first : first + count].sum() if len(cut) > 1 else task.alone_need
        if count < 1 or needed > task.room[device]:
            return False
        if first + count > task.layers or not (task.begins[device, first] and task.ends[device, first + count - 1]):
            return False
        first += count
    return first == task.layers and len({device for device, _ in cut}) == len(cut)


MARGIN = 1e-8
"""Relative difference of times above which a plan counts as better."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan found, its seconds, and a lower bound for all plans (to within 1e-8)."""

    cut: Cut
    seconds: float
    floor: float

    @property
    def optimal(self) -> bool:
        return self.floor >= self.seconds * (1.0 - 2.0 * MARGIN)

    @property
    def gap(self) -> float:
        """Return the largest share by which another plan might be faster."""
        return 0.0 if self.optimal else 1.0 - self.floor / self.seconds


Stop = Callable[[], bool]
"""A function, polled every few milliseconds, that asks for the best plan so far."""


def never() -> bool:
    """Return False: a search without a limit of its own."""
    return False


def warm(task: Task) -> Task:
    """Return the same task with every device's layers loaded already."""
    none = np.zeros(task.devices)
    return replace(task, load=np.zeros_like(task.load), alone_load=none, opening=none)

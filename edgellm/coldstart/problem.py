"""The planning problem: times and sizes by layer and device, the times of a given split (CSGO, equations 17-24), a home
as such a problem, and the paper's baselines (section 5.2)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from edgellm.coldstart.costs import Device, Floats, Links, ModelCosts, sending
from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange, StageShare

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Overlap = Literal["paper", "receiving", "streamed"]
"""Work that a device can do while it loads: nothing (equation 18); receive; receive, and compute with the layers loaded
so far."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """L layers for K devices, in seconds and bytes.

    `load` and `compute`, (K, L): seconds for one layer on one device; `load` is infinite for a layer that it lacks.
    `send`, (K, K): seconds from the row's device to the column's. `need`, (L,): bytes of a layer in memory; `capacity`,
    (K,): bytes that a device has for layers. Embedding and head belong to the first and the last layer.

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


Cut = tuple[tuple[int, int], ...]
"""A plan in short: (device, layers) of every stage, first to last."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage, in seconds from the request (equations 17-21, 24).

    It holds `layers`, loads until `load_s`, waits `wait_s` for its predecessor (equation 24), is sent its input in
    `network_s`, which is over at `received_s`, computes for `compute_s` and is done at `finish_s`.
    """

    layers: LayerRange
    load_s: float
    wait_s: float
    network_s: float
    received_s: float
    compute_s: float
    finish_s: float


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
        spans.append(StageTimes(layers, load, wait, network, received, compute, finish))
        first, before, sender = first + count, finish, device
    return tuple(spans)


def streamed(load: Floats, compute: Floats, whole: float, files: Bools, opening: float = 0.0) -> float:
    """Return when a device is done that computes each layer once its file is loaded and the previous layers are
    computed. `files` as for `Task`.

    Loading is serial: a layer is loaded after all loads up to the end of its file, and then it and all later layers are
    computed. They begin after `opening` seconds, and are over after `whole`.
    """
    last = np.append(np.flatnonzero(files[1:]), len(files) - 1)[np.cumsum(np.append(False, files[1:]))]
    loaded = np.minimum(opening + np.cumsum(load)[last], whole)
    remaining = np.cumsum(compute[::-1])[::-1]
    return float((loaded + remaining).max())


def makespan(task: Task, cut: Cut) -> float:
    """Return T of equation 23: when the last stage is done."""
    return timeline(task, cut)[-1].finish_s


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
    """Return whether each stage fits its device's memory (equation 22), has its layers there, begins and ends where it
    may, with no device used twice and no layer left."""
    first = 0
    for device, count in cut:
        needed = task.need[first : first + count].sum() if len(cut) > 1 else task.alone_need
        if count < 1 or needed > task.room[device]:
            return False
        if first + count > task.layers or not (task.begins[device, first] and task.ends[device, first + count - 1]):
            return False
        if not np.isfinite(task.load[device, first : first + count]).all():
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


def shares_of(counts: Iterable[tuple[str, int]]) -> tuple[StageShare, ...]:
    """Return the layers of each device that has some, given their numbers in order."""
    found, end = [], 0
    for name, count in counts:
        found += [StageShare(name, LayerRange(end, end + count))] if count else []
        end += count
    return tuple(found)


Objective = Literal["ttft", "reply"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices, measured links between some of them, and a model if a file describes one."""

    devices: tuple[Device, ...]
    links: Links = field(default_factory=dict)
    model: ModelCosts | None = None


@dataclass(frozen=True, slots=True)
class MemoryOverhead:
    """Bytes beside weights: least bytes of each `layer`, mostly its cache, however short a text; and of a `stage`."""

    layer: float = 0.0
    stage: float = 0.0


@dataclass(frozen=True, slots=True)
class Home:
    """Devices with the links between them, and the model and the reply that are planned for.

    The reply to `tokens_in` prompt tokens has `tokens_out`, the first of which ends the prefill. The `objective` is the
    time to minimise: to the first token (`ttft`, the paper's), or to the last. `cold`: devices load their layers first.

    Raises `InvalidOption` if there is no device.
    """

    devices: Sequence[Device]
    model: ModelCosts
    tokens_in: int
    tokens_out: int = 0
    objective: Objective = "ttft"
    links: Links = field(default_factory=dict)
    overhead: MemoryOverhead = MemoryOverhead()
    overlap: Overlap = "streamed"
    cold: bool = True

    def __post_init__(self) -> None:
        if not self.devices:
            raise InvalidOption("There is no device to plan for.", "Give at least one.")

    @property
    def further(self) -> int:
        """The number of tokens after the first."""
        return max(0, self.tokens_out - 1)

    @property
    def names(self) -> list[str]:
        """The names of the devices."""
        return [device.name for device in self.devices]

    def shares(self, cut: Cut) -> tuple[StageShare, ...]:
        """Return the layers of each device of a cut."""
        return shares_of((self.devices[device].name, count) for device, count in cut)

    def cut(self, shares: Sequence[StageShare]) -> Cut:
        """Return shares of devices of the home as the planner has them."""
        return tuple((self.names.index(share.name), len(share.layers)) for share in shares)

    def task(self) -> Task:
        """Return the planning problem, with the layers on any device, whatever it has; see `restrict_to_stored`."""
        model, devices, tokens_in = self.model, self.devices, self.tokens_in
        shape, n = model.shape, model.shape.layers
        weights = np.array(model.layer_bytes)
        weights[0] += model.embedding
        weights[-1] += model.head
        tied_bytes = min(model.embedding, model.head) if model.tied else 0.0
        cache = np.maximum(self.overhead.layer, np.array(model.cache_bytes) * (tokens_in + self.tokens_out))
        work = np.full(n, float(shape.flops(tokens_in)))
        work[-1] += model.head_flops
        step = np.full(n, float(shape.flops(1, tokens_in + self.tokens_out / 2)))
        step[-1] += model.head_flops
        read = weights + np.array(model.cache_bytes) * (tokens_in + self.tokens_out / 2)  # bytes per further token
        step_s = [read / device.bandwidth if device.bandwidth else step / device.speed(1) for device in devices]
        disk = np.array([device.disk for device in devices])
        load = weights / disk[:, None]  # eq. 19
        need = weights + cache
        begins = _with(model.begins, n)
        ends = np.append(begins[1:], True)
        task = Task(
            load=load,
            compute=work / np.array([device.speed(tokens_in) for device in devices])[:, None],  # eq. 21
            send=sending(devices, shape.activation(tokens_in), self.links),  # eq. 20
            need=need,
            capacity=np.array([device.memory for device in devices])
            - self.overhead.stage
            - shape.activation(tokens_in),
            overlap=self.overlap,
            step=np.array(step_s),
            hop=sending(devices, shape.activation(1), self.links),
            alone_load=load.sum(1) - tied_bytes / disk,
            alone_need=float(need.sum() - tied_bytes),
            begins=np.tile(begins, (len(devices), 1)),
            ends=np.tile(ends, (len(devices), 1)),
            files=_with(model.files, n),
            opening=np.array([device.opening for device in devices]),
        )
        return task if self.cold else warm(task)


def _with(layers: frozenset[int] | None, n: int) -> Bools:
    """Return whether each of n layers is one of `layers`, (n,); None: all."""
    return np.isin(np.arange(n), sorted(range(n) if layers is None else layers))


def restrict_to_stored(task: Task, devices: Sequence[Device]) -> Task:
    """Return the task restricted to the layers that the devices have. Loaded layers are not loaded again."""
    load, alone = task.load.copy(), task.alone_load.copy()
    begins, ends = task.begins.copy(), task.ends.copy()
    for at, device in enumerate(devices):
        layers = device.layers
        missing = sorted(set(range(task.layers)) - layers.stored) if layers.stored is not None else []
        loaded = sorted(layers.loaded)
        load[at, loaded] = 0.0
        load[at, missing] = np.inf
        if loaded or missing:
            alone[at] = load[at].sum()
        if layers.pieces is not None:
            begins[at] &= _with(frozenset(piece.start for piece in layers.pieces), task.layers)
            ends[at] &= _with(frozenset(piece.last for piece in layers.pieces), task.layers)
    return replace(task, load=load, alone_load=alone, begins=begins, ends=ends)


def even(peak: npt.ArrayLike, task: Task) -> Cut | None:
    """Return equal parts for all devices, by falling `peak` (K,); None if a part does not fit."""
    count = min(task.devices, task.layers)
    order = np.argsort(-np.asarray(peak), kind="stable")[:count].tolist()
    least, more = divmod(task.layers, count)
    return _if_fits(task, tuple((device, least + (at < more)) for at, device in enumerate(order)))


def heuristic(speed: npt.ArrayLike, disk: npt.ArrayLike, task: Task) -> Cut | None:
    """Return parts by the harmonic mean of computing and disk speed, (K,), as shares of the best; strongest first.

    Sizes are rounded up in that order. None if a part does not fit.
    """
    speed, disk = np.asarray(speed), np.asarray(disk)
    strength = 2.0 / (speed.max() / speed + disk.max() / disk)
    left, cut = task.layers, []
    for device in np.argsort(-strength, kind="stable").tolist():
        count = min(left, math.ceil(task.layers * strength[device] / strength.sum() - 1e-9))
        if count:
            cut.append((device, count))
        left -= count
    return _if_fits(task, tuple(cut))


def best_single(task: Task) -> Cut | None:
    """Return all layers on the fastest device that can hold them; None if none can."""
    singles = [((device, task.layers),) for device in range(task.devices)]
    return min((cut for cut in singles if fits(task, cut)), key=partial(makespan, task), default=None)


def ideal_single(peak: npt.ArrayLike, task: Task) -> Cut:
    """Return all layers on the device with the highest peak, whatever its memory."""
    return ((int(np.asarray(peak).argmax()), task.layers),)


def _if_fits(task: Task, cut: Cut) -> Cut | None:
    return cut if fits(task, cut) else None

"""A home as a planning problem, and the paper's baselines (CSGO, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgellm.coldstart.costs import ANY_LAYERS, Device, Links, ModelCosts, sending
from edgellm.coldstart.problem import Bools, Cut, Overlap, Task, fits, warm
from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange, StageShare

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
        ends = accumulate(count for _, count in cut)
        return tuple(
            StageShare(self.devices[device].name, LayerRange(end - count, end))
            for (device, count), end in zip(cut, ends, strict=True)
        )

    def cut(self, shares: Sequence[StageShare]) -> Cut:
        """Return shares of devices of the home as the planner has them."""
        return tuple((self.names.index(share.name), len(share.layers)) for share in shares)

    @property
    def anywhere(self) -> bool:
        """Return whether every device may load any layer."""
        return all(device.layers == ANY_LAYERS for device in self.devices)

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


def restrict_to_stored(task: Task, devices: Sequence[Device], further: int) -> tuple[Task, float]:
    """Return the task restricted to the layers that the devices have, and the penalty in seconds for loading a missing
    layer. Loaded layers are not loaded again.

    Every plan that uses only stored layers takes less than the penalty. `further`: tokens after the first that count,
    too.
    """
    penalty = 2.0 * task.longest(further)
    load, alone = task.load.copy(), task.alone_load.copy()
    begins, ends = task.begins.copy(), task.ends.copy()
    for at, device in enumerate(devices):
        layers = device.layers
        missing = sorted(set(range(task.layers)) - layers.stored) if layers.stored is not None else []
        loaded = sorted(layers.loaded)
        load[at, loaded] = 0.0
        load[at, missing] = penalty
        if loaded or missing:
            alone[at] = load[at].sum()
        for mask, allowed in ((begins, layers.begins), (ends, layers.ends)):
            if allowed is not None:
                mask[at] &= np.isin(np.arange(task.layers), sorted(allowed))
    return replace(task, load=load, alone_load=alone, begins=begins, ends=ends), penalty


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
    load = task.opening + task.alone_load + task.compute.sum(1)
    return min((cut for cut in singles if fits(task, cut)), key=lambda cut: load[cut[0][0]], default=None)


def ideal_single(peak: npt.ArrayLike, task: Task) -> Cut:
    """Return all layers on the device with the highest peak, whatever its memory."""
    return ((int(np.asarray(peak).argmax()), task.layers),)


def _if_fits(task: Task, cut: Cut) -> Cut | None:
    return cut if fits(task, cut) else None

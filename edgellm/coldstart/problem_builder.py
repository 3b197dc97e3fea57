"""Builds the planning problem from devices and a model, and the paper's baselines (CSGO, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, Links, sending
from edgellm.coldstart.problem import Bools, Cut, Overlap, Task, fits
from edgellm.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class MemoryOverhead:
    """Bytes beside weights: at least for each `layer`, mostly its cache, however short a text is; and for a `stage`."""

    layer: float = 0.0
    stage: float = 0.0


def task_of(
    devices: Sequence[Device], model: ModelCosts, tokens_in: int, tokens_out: int = 0, overlap: Overlap = "streamed",
    links: Links | None = None, overhead: MemoryOverhead = MemoryOverhead(),
) -> Task:  # fmt: skip
    """Return the task of answering `tokens_in` prompt tokens with `tokens_out`, the first of which ends the prefill.
    The layers may be on any device, whatever it has; see `restrict_to_stored`.

    Raises `InvalidOption` if there is no device, or a number of tokens makes no sense.
    """
    if not devices:
        raise InvalidOption("There is no device to plan for.", "Give at least one.")
    if tokens_in < 1 or tokens_out < 0:
        raise InvalidOption(f"The prompt has {tokens_in} tokens and the reply {tokens_out}.", "Give at least 1 and 0.")
    shape, n = model.shape, model.shape.layers
    weights = np.array(model.layer_bytes)
    weights[0] += model.embedding
    weights[-1] += model.head
    tied_bytes = min(model.embedding, model.head) if model.tied else 0.0
    cache = np.maximum(overhead.layer, np.array(model.cache_bytes) * (tokens_in + tokens_out))
    work = np.full(n, float(shape.flops(tokens_in)))
    work[-1] += model.head_flops
    step = np.full(n, float(shape.flops(1, tokens_in + tokens_out / 2)))
    step[-1] += model.head_flops
    read = weights + np.array(model.cache_bytes) * (tokens_in + tokens_out / 2)  # for each further token
    step_s = [read / device.bandwidth if device.bandwidth else step / device.speed(1) for device in devices]
    disk = np.array([device.disk for device in devices])
    load = weights / disk[:, None]  # eq. 19
    need = weights + cache
    begins = _with(model.begins, n)
    ends = np.append(begins[1:], True)
    return Task(
        load=load,
        compute=work / np.array([device.speed(tokens_in) for device in devices])[:, None],  # eq. 21
        send=sending(devices, shape.activation(tokens_in), links),  # eq. 20
        need=need,
        capacity=np.array([device.memory for device in devices]) - overhead.stage - shape.activation(tokens_in),
        overlap=overlap,
        step=np.array(step_s),
        hop=sending(devices, shape.activation(1), links),
        alone_load=load.sum(1) - tied_bytes / disk,
        alone_need=float(need.sum() - tied_bytes),
        begins=np.tile(begins, (len(devices), 1)),
        ends=np.tile(ends, (len(devices), 1)),
        files=_with(model.files, n),
        opening=np.array([device.opening for device in devices]),
    )


def _with(layers: frozenset[int] | None, n: int) -> Bools:
    """Return for each of n layers whether it is one of these, (n,); None: all."""
    return np.isin(np.arange(n), sorted(range(n) if layers is None else layers))


def restrict_to_stored(task: Task, devices: Sequence[Device], further: int) -> tuple[Task, float]:
    """Return the task restricted to the layers that the devices have, and the penalty in seconds for loading a missing
    layer. Loaded layers are not loaded again.

    Every plan that uses only stored layers takes less than the penalty. `further`: tokens after the first that count,
    too.
    """
    once = (task.opening, task.load, task.compute, task.send, task.alone_load)
    penalty = 2.0 * float(sum(seconds.sum() for seconds in once)) + 1.0
    penalty += 2.0 * further * float(task.step.sum() + task.hop.sum())
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
    """Return equal parts for all devices, those of the highest `peak` (K,) first; None if a part does not fit."""
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

"""From devices and a model to the numbers of a task, and the paper's ways to split without planning (CSGO, 5.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, Links, sending
from edgellm.coldstart.problem import Cut, Overlap, Task, fits
from edgellm.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class LayersOnDevice:
    """The layers of a model that a device has, counted from 0: on its `disk` (None: any that it needs), and loaded.

    A device cannot load what is not on its disk, and need not load what is in its memory. `begins` and `ends`: layers
    with which its stage may begin and end, as pieces on its disk do; None: any.
    """

    disk: frozenset[int] | None = None
    memory: frozenset[int] = frozenset()
    begins: frozenset[int] | None = None
    ends: frozenset[int] | None = None


def task_of(
    devices: Sequence[Device], model: ModelCosts, tokens_in: int, tokens_out: int = 0, overlap: Overlap = "streamed",
    links: Links | None = None, reserved: float = 0.0,
) -> Task:  # fmt: skip
    """Return the task of answering `tokens_in` prompt tokens with `tokens_out`, the first of which ends the prefill.

    `reserved`: the least bytes that a layer takes beside its weights, however short prompt and reply are.

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
    twice = min(model.embedding, model.head) if model.tied else 0.0
    cache = np.maximum(reserved, np.array(model.cache_bytes) * (tokens_in + tokens_out))
    work = np.full(n, float(shape.flops(tokens_in)))
    work[-1] += model.head_flops
    step = np.full(n, float(shape.flops(1, tokens_in + tokens_out / 2)))
    step[-1] += model.head_flops
    read = weights + np.array(model.cache_bytes) * (tokens_in + tokens_out / 2)  # for each further token
    step_s = [read / device.bandwidth if device.bandwidth else step / device.speed(1) for device in devices]
    disk = np.array([device.disk for device in devices])
    load = weights / disk[:, None]  # eq. 19
    need = weights + cache
    return Task(
        load=load,
        compute=work / np.array([device.speed(tokens_in) for device in devices])[:, None],  # eq. 21
        send=sending(devices, shape.activation(tokens_in), links),  # eq. 20
        need=need,
        room=np.array([device.memory - shape.activation(tokens_in) for device in devices]),  # eq. 22
        overlap=overlap,
        step=np.array(step_s),
        hop=sending(devices, shape.activation(1), links),
        alone_load=load.sum(1) - twice / disk,
        alone_need=float(need.sum() - twice),
    )


def where_it_lies(
    task: Task, devices: Sequence[Device], model: ModelCosts, kept: Mapping[str, LayersOnDevice], further: int
) -> tuple[Task, float]:  # fmt: skip
    """Return the task with the layers where they are, and the seconds of penalty that a missing layer takes to load.

    A plan that uses only layers where they are takes less than the penalty. `further`: tokens after the first that
    count, too. A device not in `kept` has no layers. A device's memory excludes the weights that are loaded.
    """
    beyond = 2.0 * float(task.load.sum() + task.compute.sum() + task.send.sum() + task.alone_load.sum()) + 1.0
    beyond += 2.0 * further * float(task.step.sum() + task.hop.sum())
    load, room, alone = task.load.copy(), task.room.copy(), task.alone_load.copy()
    begins, ends = task.begins.copy(), task.ends.copy()
    nothing = LayersOnDevice(frozenset())
    for at, device in enumerate(devices):
        has = kept.get(device.name, nothing)
        missing = sorted(set(range(task.layers)) - has.disk) if has.disk is not None else []
        warm = sorted(has.memory)
        load[at, warm] = 0.0
        load[at, missing] = beyond
        room[at] += sum(model.layer_bytes[layer] for layer in warm)
        if warm or missing:
            alone[at] = load[at].sum()
        for may, allowed in ((begins, has.begins), (ends, has.ends)):
            if allowed is not None:
                may[at] = np.isin(np.arange(task.layers), sorted(allowed))
    return replace(task, load=load, room=room, alone_load=alone, begins=begins, ends=ends), beyond


def even(peak: npt.ArrayLike, task: Task) -> Cut | None:
    """Return equal parts for all devices, those of the highest `peak` (K,) first; None if a part does not fit."""
    many = min(task.devices, task.layers)
    order = np.argsort(-np.asarray(peak), kind="stable")[:many].tolist()
    least, more = divmod(task.layers, many)
    return _fitting(task, tuple((device, least + (at < more)) for at, device in enumerate(order)))


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
    return _fitting(task, tuple(cut))


def best_single(task: Task) -> Cut | None:
    """Put all layers on the device that is done first, of those that can hold them; return None if none can."""
    singles = [((device, task.layers),) for device in range(task.devices)]
    load = task.alone_load + task.compute.sum(1)
    return min((cut for cut in singles if fits(task, cut)), key=lambda cut: load[cut[0][0]], default=None)


def ideal_single(peak: npt.ArrayLike, task: Task) -> Cut:
    """Put all layers on the device of the highest peak, whatever its memory."""
    return ((int(np.asarray(peak).argmax()), task.layers),)


def _fitting(task: Task, cut: Cut) -> Cut | None:
    return cut if fits(task, cut) else None

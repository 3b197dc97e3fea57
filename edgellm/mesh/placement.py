"""Placement of a model's layers on the devices of a home, before a reply and after the loss of a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import MIN_SAVING, Objective, Plan, PlanOption, format_seconds, solve
from edgellm.coldstart.plan import plan as best_plan
from edgellm.coldstart.problem import Stop, Task, never
from edgellm.coldstart.problem_builder import LayersOnDevice
from edgellm.errors import PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.fleet_file import Fleet
from edgellm.rpc.discovery.workers import Worker

if TYPE_CHECKING:
    from edgellm.coldstart.plan import Plan, PlanOption


def plan_shares(plan: Plan) -> tuple[StageShare, ...]:
    """Return the shares of a plan."""
    return plan_option_shares(plan.option)


def plan_option_shares(option: PlanOption) -> tuple[StageShare, ...]:
    """Return the shares of a way to hold the model."""
    return tuple(StageShare(stage.device, stage.layers) for stage in option.stages)


@dataclass(frozen=True, slots=True)
class DeviceCapability:
    """A device, the layers that it holds on its disk and those that it has loaded, and what they cost.

    `load` and `step`: seconds to load a layer, and to compute it for one token; `hop`: to send a token's rows to it;
    `most`: layers for which it has memory, and `memory`: bytes that it gives to models, 0 where it sets no limit.
    `begins` and `ends`: layers with which one of its ranges may begin and end, because a piece does; None: any.
    """

    name: str
    holds: frozenset[int]
    warm: frozenset[int] = frozenset()
    load: float = 1.0
    step: float = 0.05
    hop: float = 0.01
    most: int = 1 << 30
    memory: int = 0
    begins: frozenset[int] | None = None
    ends: frozenset[int] | None = None

    def takes(self, layers: LayerRange) -> bool:
        """Return whether these layers are there, and can be loaded without those around them."""
        return self.may_begin(layers.start) and self.may_end(layers.last) and self.holds.issuperset(layers)

    def may_begin(self, layer: int) -> bool:
        return self.begins is None or layer in self.begins

    def may_end(self, layer: int) -> bool:
        return self.ends is None or layer in self.ends


_MAX_STEP = 10  # devices that are considered: the number of their sets doubles with each


def fail_over(
    devices: Sequence[DeviceCapability], layers: int, tokens: int = 64, stop: Stop = never
) -> tuple[StageShare, ...] | None:
    """Return the shares, in order, with which `tokens` more tokens of a reply come first; None if no split is possible.

    What a layer costs is not measured in the middle of a reply: `load`, `step` and `hop` are the devices' own figures.
    """
    devices = devices[:_MAX_STEP]
    if not devices:
        return None
    here = range(layers)
    step = np.array([[device.step] * layers for device in devices])
    loads = np.array([[0.0 if layer in device.warm else device.load for layer in here] for device in devices])
    hop = np.tile([device.hop for device in devices], (len(devices), 1))
    beyond = 2.0 * float(loads.sum() + (tokens + 1) * (step.sum() + hop.sum())) + 1.0
    held = np.array([[layer in device.holds for layer in here] for device in devices])
    task = Task(
        load=np.where(held, loads, beyond), compute=step, send=hop, step=step, hop=hop, need=np.ones(layers),
        capacity=np.array([float(device.most) for device in devices]), overlap="streamed",
        begins=np.array([[device.may_begin(layer) for layer in here] for device in devices]),
        ends=np.array([[device.may_end(layer) for layer in here] for device in devices]),
    )  # fmt: skip
    found = solve(task, tokens, stop)
    if found is None or found.seconds >= beyond:
        return None
    shares, at = [], 0
    for device, count in found.cut:
        shares.append(StageShare(devices[device].name, LayerRange(at, at + count)))
        at += count
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class MemoryOverhead:
    """Bytes needed beside weights: for each `layer`, mostly its cache, and for a `stage` as such."""

    layer: float = 0.0
    stage: float = 0.0


@dataclass(frozen=True, slots=True)
class MissingLayers:
    """The layers of a share of a plan that are not on its device's disk, and their `size` in bytes."""

    share: StageShare
    layers: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The `shares` of the devices now, and the times expected of them; `reason` explains the choice.

    `best`: the plan if every layer could be anywhere; None if the devices could not hold the model. `lacking`: the
    layers to copy for that plan. `fleet`: the devices, with the memory that each has for layers in all, loaded ones
    included. `unused` devices, and those `left_out` because they could not be asked: each with the reason.
    """

    shares: tuple[StageShare, ...]
    option: PlanOption
    reason: str
    best: Plan | None
    lacking: tuple[MissingLayers, ...]
    fleet: Fleet
    workers: Mapping[str, Worker]
    unused: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...]

    def advice(self, model: str) -> str:
        """Return a sentence on how to be faster next time, with `model` as the user calls it; empty if nothing would be
        worth it."""
        if self.best is None or not self.lacking:
            return ""
        if self.best.seconds(self.best.advised) > (1.0 - MIN_SAVING) * self.best.seconds(self.option):
            return ""
        lacking = ", ".join(f"{one.share.name} {one.size / 1e6:,.0f} MB" for one in self.lacking)
        goal = "the whole reply" if self.best.objective == "reply" else "the first token"
        sooner, now = self.best.seconds(self.best.advised), self.best.seconds(self.option)
        return (
            f"With layers {_named(plan_option_shares(self.best.advised))}, {goal} would take {format_seconds(sooner)}"
            f" instead of {format_seconds(now)}, but not all of them are stored there ({lacking} missing):"
            f" {self.deploy(model)}"
        )

    def why(self) -> list[tuple[str, str]]:
        """Return the reason for each device's layers, or for its having none."""
        found = [(stage.device, f"{stage.layers}: {stage.reason}")
                 for stage in self.option.stages]  # fmt: skip
        return [*found, *self.unused, *self.left_out]

    def deploy(self, model: str) -> str:
        """Return the command that copies the lacking layers."""
        return deploy_command(model, self.lacking, self.workers)


def deploy_command(model: str, lacking: Iterable[MissingLayers], workers: Mapping[str, Worker]) -> str:
    """Return the `edgellm mesh deploy` command for these; it does not send layers again that are there already."""
    parts = []
    for one in lacking:
        worker = workers.get(one.share.name)
        name = str(worker.address) if worker is not None and worker.peer is None else one.share.name
        parts.append(f"{name}:{one.share.layers}")
    return f"edgellm mesh deploy {model} --split {','.join(parts)}"


def place(
    model: ModelCosts, home: Fleet, workers: Mapping[str, Worker], capabilities: Sequence[DeviceCapability], *,
    tokens_in: int, tokens_out: int,
    overhead: MemoryOverhead = MemoryOverhead(), objective: Objective = "ttft",
    left_out: Sequence[tuple[str, str]] = (), stop: Stop = never,
) -> Placement:  # fmt: skip
    """Return the best split over the layers that the devices of the `home` have. `capabilities` are those of the usable
    devices; `overhead`: bytes of a stage beside weights; the rest as for `edgellm.coldstart.plan.plan`.

    Raises:
        PlanImpossible: the layers are not where there is memory for them; says what to copy where, if that helps.
    """
    fleet = _fleet(home, capabilities, model, overhead.stage)
    planned = partial(
        best_plan, fleet.devices, model, tokens_in, tokens_out, objective=objective, links=fleet.links,
        reserved=overhead.layer, stop=stop,
    )  # fmt: skip
    best: Plan | None = None
    impossible: PlanImpossible | None = None
    try:
        best = planned(kept={one.name: LayersOnDevice(None, one.warm) for one in capabilities})
    except PlanImpossible as error:
        impossible = error
    lacking = () if best is None else tuple(missing(model, plan_option_shares(best.advised), capabilities))
    finish = partial(
        Placement, best=best, lacking=lacking, fleet=_with_loaded(fleet, capabilities, model), workers=workers,
        left_out=tuple(left_out),
    )  # fmt: skip
    if best is not None and not lacking and _whole(plan_option_shares(best.advised), capabilities):
        return finish(plan_option_shares(best.advised), best.advised, best.advice, unused=best.unused)
    try:
        now = planned(
            kept={one.name: LayersOnDevice(one.holds, one.warm, one.begins, one.ends) for one in capabilities}
        )
    except PlanImpossible as error:
        if impossible is not None:
            raise impossible from None
        command = deploy_command("MODEL", lacking, workers) if lacking else _DEPLOY
        raise PlanImpossible(error.what, f"Deploy them: {command}") from None
    return finish(
        plan_option_shares(now.advised),
        now.advised,
        f"With the layers that the devices have: {now.advice}",
        unused=now.unused,
    )


def _fleet(home: Fleet, capabilities: Sequence[DeviceCapability], model: ModelCosts, reserved: float) -> Fleet:
    """Return the usable devices, each with its memory beside the layers of the model that it has loaded, less the
    `reserved` bytes of any stage."""
    gives = {one.name: one.memory - _loaded(one, model) if one.memory else math.inf for one in capabilities}
    devices = tuple(
        replace(device, memory=max(1.0, min(device.memory, gives[device.name]) - reserved))
        for device in home.devices
        if device.name in gives
    )
    return Fleet(devices, home.links)


def _with_loaded(fleet: Fleet, capabilities: Sequence[DeviceCapability], model: ModelCosts) -> Fleet:
    """Return the fleet with each device's memory for layers in all, including those that it has loaded."""
    loaded = {one.name: _loaded(one, model) for one in capabilities}
    devices = tuple(replace(device, memory=device.memory + loaded[device.name]) for device in fleet.devices)
    return Fleet(devices, fleet.links)


def _loaded(one: DeviceCapability, model: ModelCosts) -> float:
    return sum(model.layer_bytes[layer] for layer in one.warm)


def missing(
    model: ModelCosts, shares: Sequence[StageShare], capabilities: Sequence[DeviceCapability]
) -> Iterable[MissingLayers]:
    """Yield the layers that each device lacks of its share."""
    holds = {one.name: one.holds for one in capabilities}
    for share in shares:
        layers = sorted(set(share.layers) - holds[share.name])
        if layers:
            size = sum(model.layer_bytes[layer] for layer in layers)
            size += model.embedding * (layers[0] == 0) + model.head * (layers[-1] == model.shape.layers - 1)
            yield MissingLayers(share, tuple(layers), int(size))


def _whole(shares: Sequence[StageShare], capabilities: Sequence[DeviceCapability]) -> bool:
    named = {one.name: one for one in capabilities}
    return all(named[share.name].takes(share.layers) for share in shares)


def _named(shares: Sequence[StageShare]) -> str:
    return ", ".join(f"{share.layers} on {share.name}" for share in shares)


_DEPLOY = "edgellm mesh deploy MODEL"

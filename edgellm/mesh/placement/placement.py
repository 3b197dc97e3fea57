"""A model over the measured home: the best split there is, and the best that can run with the layers where they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import WORTH, Objective, Plan, Way, foreseen, told
from edgellm.coldstart.plan import plan as best_plan
from edgellm.coldstart.planner import never
from edgellm.coldstart.problem_builder import LayersOnDevice
from edgellm.coldstart.solver.label_search import Stop
from edgellm.errors import PlanImpossible
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.placement.failover_planner import Able, cover
from edgellm.mesh.placement.split import Share, of_way
from edgellm.rpc.discovery.workers import Worker


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes needed beside weights: for each `layer`, mostly its cache, and for a `stage` as such."""

    layer: float = 0.0
    stage: float = 0.0


@dataclass(frozen=True, slots=True)
class Lacking:
    """The layers of a share of a plan that are not on its device's disk, and their `size` in bytes."""

    share: Share
    layers: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The `shares` of the devices now, and the times expected of them; `reason` explains the choice.

    `best`: the plan if every layer could be anywhere; None if the devices could not hold the model. `lacking`: the
    layers to copy for that plan. `fleet`: the devices, with the memory that each has for layers in all, loaded ones
    included. `unused` devices, and those `left_out` because they could not be asked: each with the reason.
    """

    shares: tuple[Share, ...]
    way: Way
    reason: str
    best: Plan | None
    lacking: tuple[Lacking, ...]
    fleet: Fleet
    workers: Mapping[str, Worker]
    unused: tuple[tuple[str, str], ...]
    left_out: tuple[tuple[str, str], ...]

    def advice(self, model: str) -> str:
        """Return a sentence on how to be faster next time, with `model` as the user calls it; empty if nothing would be
        worth it."""
        if self.best is None or not self.lacking:
            return ""
        if self.best.seconds(self.best.advised) > (1.0 - WORTH) * self.best.seconds(self.way):
            return ""
        lacking = ", ".join(f"{one.share.name} {one.size / 1e6:,.0f} MB" for one in self.lacking)
        goal = "the whole reply" if self.best.objective == "reply" else "the first token"
        sooner, now = self.best.seconds(self.best.advised), self.best.seconds(self.way)
        return (
            f"With layers {_named(of_way(self.best.advised))}, {goal} would take {told(sooner)} instead of {told(now)},"
            f" but not all of them are there ({lacking} missing): {self.deploy(model)}"
        )

    def why(self) -> list[tuple[str, str]]:
        """Return the reason for each device's layers, or for its having none."""
        found = [(stage.device, f"{stage.layers}: {stage.reason}")
                 for stage in self.way.stages]  # fmt: skip
        return [*found, *self.unused, *self.left_out]

    def deploy(self, model: str) -> str:
        """Return the command that copies the lacking layers."""
        return deploy_command(model, self.lacking, self.workers)


def deploy_command(model: str, lacking: Iterable[Lacking], workers: Mapping[str, Worker]) -> str:
    """Return the `edgellm mesh deploy` command for these; it does not send layers again that are there already."""
    parts = []
    for one in lacking:
        worker = workers.get(one.share.name)
        name = str(worker.address) if worker is not None and worker.peer is None else one.share.name
        parts.append(f"{name}:{one.share.layers}")
    return f"edgellm mesh deploy {model} --split {','.join(parts)}"


def place(
    model: ModelCosts, home: Fleet, workers: Mapping[str, Worker], able: Sequence[Able], *,
    tokens_in: int, tokens_out: int,
    room: Room = Room(), objective: Objective = "ttft", left_out: Sequence[tuple[str, str]] = (), stop: Stop = never,
) -> Placed:  # fmt: skip
    """Return the best split over the layers that the devices of the `home` have. `able`: the usable devices, with what
    each holds now; `room`: bytes of a stage beside weights; the rest as for `edgellm.coldstart.plan.plan`.

    Raises:
        PlanImpossible: the layers are not where there is memory for them; says what to copy where, if that helps.
    """
    fleet = _fleet(home, able, model, room.stage)
    planned = partial(
        best_plan, fleet.devices, model, tokens_in, tokens_out, objective=objective, links=fleet.links,
        reserved=room.layer, stop=stop,
    )  # fmt: skip
    best: Plan | None = None
    trouble: PlanImpossible | None = None
    try:
        best = planned(kept={one.name: LayersOnDevice(None, one.warm) for one in able})
    except PlanImpossible as error:
        trouble = error
    lacking = () if best is None else tuple(missing(model, of_way(best.advised), able))
    finish = partial(
        Placed, best=best, lacking=lacking, fleet=_with_loaded(fleet, able, model), workers=workers,
        left_out=tuple(left_out),
    )  # fmt: skip
    if best is not None and not lacking and _whole(of_way(best.advised), able):
        return finish(of_way(best.advised), best.advised, best.advice, unused=best.unused)
    try:
        now = planned(kept={one.name: LayersOnDevice(one.holds, one.warm) for one in able})
    except PlanImpossible as error:
        if trouble is not None:
            raise trouble from None
        command = deploy_command("MODEL", lacking, workers)
        raise PlanImpossible(error.what, f"Bring them there: {command}") from None
    shares, way = of_way(now.advised), now.advised
    reason = f"Of what the devices have: {now.advice}"
    if not _whole(shares, able):  # pieces of several layers that it would cut in two
        found = cover(able, model.shape.layers, tokens_out)
        if found is None:
            raise PlanImpossible(
                "The pieces that the devices have cannot be put in a row.", f"Bring others: {_DEPLOY}"
            )  # fmt: skip
        names = [device.name for device in fleet.devices]
        cut = tuple((names.index(one.name), len(one.layers)) for one in found)
        way = foreseen(fleet.devices, model, cut, tokens_in, tokens_out, links=fleet.links)
        shares, reason = found, f"Where the pieces on the devices begin and end: {_named(found)}."
    return finish(shares, way, reason, unused=now.unused)


def _fleet(home: Fleet, able: Sequence[Able], model: ModelCosts, taken: float) -> Fleet:
    """Return the usable devices, each with its memory beside the layers of the model that it has loaded, less the
    `taken` bytes of any stage."""
    gives = {one.name: one.memory - _loaded(one, model) if one.memory else math.inf for one in able}
    devices = tuple(
        replace(device, memory=max(1.0, min(device.memory, gives[device.name]) - taken))
        for device in home.devices
        if device.name in gives
    )
    return Fleet(devices, home.links)


def _with_loaded(fleet: Fleet, able: Sequence[Able], model: ModelCosts) -> Fleet:
    """Return the fleet with each device's memory for layers in all, including those that it has loaded."""
    loaded = {one.name: _loaded(one, model) for one in able}
    devices = tuple(replace(device, memory=device.memory + loaded[device.name]) for device in fleet.devices)
    return Fleet(devices, fleet.links)


def _loaded(one: Able, model: ModelCosts) -> float:
    return sum(model.layer_bytes[layer] for layer in one.warm)


def missing(model: ModelCosts, shares: Sequence[Share], able: Sequence[Able]) -> Iterable[Lacking]:
    """Yield the layers that each device lacks of its share."""
    holds = {one.name: one.holds for one in able}
    for share in shares:
        layers = sorted(set(share.layers) - holds[share.name])
        if layers:
            size = sum(model.layer_bytes[layer] for layer in layers)
            size += model.embedding * (layers[0] == 0) + model.head * (layers[-1] == model.shape.layers - 1)
            yield Lacking(share, tuple(layers), int(size))


def _whole(shares: Sequence[Share], able: Sequence[Able]) -> bool:
    named = {one.name: one for one in able}
    return all(named[share.name].takes(share.layers) for share in shares)


def _named(shares: Sequence[Share]) -> str:
    return ", ".join(f"{share.layers} on {share.name}" for share in shares)


_DEPLOY = "edgellm mesh deploy MODEL"

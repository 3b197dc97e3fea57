"""Placement of a model's layers on the devices of a home, before a reply and after the loss of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, LayersOnDevice, Links
from edgellm.coldstart.plan import MIN_SAVING, Objective, Plan, PlanOption, format_seconds, solve
from edgellm.coldstart.plan import plan as best_plan
from edgellm.coldstart.problem import Stop, never
from edgellm.coldstart.problem_builder import MemoryOverhead, restrict_to_stored, task_of
from edgellm.errors import PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.fleet_file import Fleet

if TYPE_CHECKING:
    from edgellm.coldstart.plan import Plan, PlanOption
    from edgellm.rpc.discovery.workers import Worker


def plan_shares(plan: Plan) -> tuple[StageShare, ...]:
    """Return the shares of a plan."""
    return plan_option_shares(plan.option)


def plan_option_shares(option: PlanOption) -> tuple[StageShare, ...]:
    """Return the shares of a way to hold the model."""
    return tuple(StageShare(stage.device, stage.layers) for stage in option.stages)


_MAX_STEP = 10  # devices that are considered: the number of their sets doubles with each


def fail_over(
    devices: Sequence[Device], model: ModelCosts, text: int = 1, further: int = 64, *,
    links: Links | None = None, overhead: MemoryOverhead = MemoryOverhead(), stop: Stop = never,
) -> tuple[StageShare, ...] | None:  # fmt: skip
    """Return the shares, in order, with which `further` more tokens of a reply come first, once the `text`
    tokens so far are read again; None if no split over the layers that the devices have is possible."""
    devices = devices[:_MAX_STEP]
    if not devices:
        return None
    task = task_of(devices, model, text, further, links=links, overhead=overhead)
    task, penalty = restrict_to_stored(task, devices, further)
    found = solve(task, further, stop)
    if found is None or found.seconds >= penalty:
        return None
    shares, at = [], 0
    for device, count in found.cut:
        shares.append(StageShare(devices[device].name, LayerRange(at, at + count)))
        at += count
    return tuple(shares)


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
    layers to copy for that plan. `fleet`: the devices, with the layers that they have. `unused` devices, and those
    `left_out` because they could not be asked: each with the reason.
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
    model: ModelCosts, home: Fleet, workers: Mapping[str, Worker], *, tokens_in: int, tokens_out: int,
    overhead: MemoryOverhead = MemoryOverhead(), objective: Objective = "ttft",
    left_out: Sequence[tuple[str, str]] = (), stop: Stop = never, cold: bool = True,
) -> Placement:  # fmt: skip
    """Return the best split over the layers that the devices of the `home` have. The arguments are as for
    `edgellm.coldstart.plan.plan`.

    Raises:
        PlanImpossible: the layers are not where there is memory for them; says what to copy where, if that helps.
    """
    planned = partial(
        best_plan, model=model, tokens_in=tokens_in, tokens_out=tokens_out, objective=objective, links=home.links,
        overhead=overhead, stop=stop, cold=cold,
    )  # fmt: skip
    every = frozenset(range(model.shape.layers))
    best: Plan | None = None
    impossible: PlanImpossible | None = None
    try:
        best = planned([replace(one, layers=LayersOnDevice(every, one.layers.loaded)) for one in home.devices])
    except PlanImpossible as error:
        impossible = error
    lacking = () if best is None else tuple(missing(model, plan_option_shares(best.advised), home.devices))
    finish = partial(Placement, best=best, lacking=lacking, fleet=home, workers=workers, left_out=tuple(left_out))
    if best is not None and not lacking and _whole(plan_option_shares(best.advised), home.devices):
        return finish(plan_option_shares(best.advised), best.advised, best.advice, unused=best.unused)
    try:
        now = planned(home.devices)
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


def missing(model: ModelCosts, shares: Sequence[StageShare], devices: Sequence[Device]) -> Iterable[MissingLayers]:
    """Yield the layers that each device lacks of its share."""
    stored = {one.name: one.layers.stored for one in devices}
    for share in shares:
        there = stored[share.name]
        layers = [] if there is None else sorted(set(share.layers) - there)
        if layers:
            size = sum(model.layer_bytes[layer] for layer in layers)
            size += model.embedding * (layers[0] == 0) + model.head * (layers[-1] == model.shape.layers - 1)
            yield MissingLayers(share, tuple(layers), int(size))


def _whole(shares: Sequence[StageShare], devices: Sequence[Device]) -> bool:
    named = {one.name: one.layers for one in devices}
    return all(named[share.name].takes(share.layers) for share in shares)


def _named(shares: Sequence[StageShare]) -> str:
    return ", ".join(f"{share.layers} on {share.name}" for share in shares)


_DEPLOY = "edgellm mesh deploy MODEL"

"""Placement of a model's layers on the devices of a home, before a reply, behind it, and after the loss of a device."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from edgellm.coldstart.costs import ANY_LAYERS, Device, LayersOnDevice, ModelCosts
from edgellm.coldstart.plan import MIN_SAVING, Plan, format_seconds, plan, solve
from edgellm.coldstart.problem import Home, Stop, never, restrict_to_stored
from edgellm.engine import ModelFile
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.errors import ModelUnsupported, PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.layer_costs import shape_of
from edgellm.storage.layer_pieces import grid, grid_lines

if TYPE_CHECKING:
    from edgellm.coldstart.phases import Phases
    from edgellm.rpc.layers import Worker

COURSES = (
    "edgellm.coldstart.phases",
)  # fmt: skip
"""The modules that plan a reply which begins with other shares than it ends with."""
PLAN_SECONDS = 2.0  # seconds of planning, after which the best plan so far is taken


def within(seconds: float) -> Stop:
    """Return a stop that is true after `seconds` from now on."""
    began = time.monotonic()
    return lambda: time.monotonic() - began > seconds


def fail_over(
    home: Home, devices: Sequence[Device], text: int = 1, further: int = 64, stop: Stop = never
) -> tuple[StageShare, ...] | None:
    """Return the shares, in order, with which `further` more tokens of a reply in a `home` come first, once the `text`
    tokens so far are read again; None if no split over the layers that these `devices` have is possible."""
    if not devices:
        return None
    left = replace(home, devices=devices, tokens_in=text, tokens_out=further)
    found = solve(restrict_to_stored(left.task(), devices), further, stop)
    return None if found is None else left.shares(found.cut)


Lacking = tuple[StageShare, int]
"""A share of a plan, and the bytes of its layers that are not on its device's disk."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The `shares` of the devices now, by a `plan` for the layers that they have.

    `home`: the devices. `best`: the plan if every layer could be anywhere; None if the devices could not hold the
    model. `lacking`: the layers to copy for that plan. `left_out`: devices that could not be asked, each with the
    reason. `workers`: the devices that were asked; None if the home is only described.
    """

    home: Home
    shares: tuple[StageShare, ...]
    plan: Plan
    best: Plan | None
    lacking: tuple[Lacking, ...]
    workers: "Mapping[str, Worker] | None" = None
    left_out: tuple[tuple[str, str], ...] = ()
    phases: "Phases | None" = None

    def advice(self, model: str) -> str:
        """Return a sentence on how to be faster next time, with `model` as the user calls it; empty if nothing would be
        worth it."""
        if self.best is None or not self.lacking:
            return ""
        sooner, now = self.best.seconds(self.best.advised), self.best.seconds(self.plan.advised)
        if sooner > (1.0 - MIN_SAVING) * now:
            return ""
        lacking = ", ".join(f"{share.name} {size / 1e6:,.0f} MB" for share, size in self.lacking)
        goal = "the whole reply" if self.home.objective == "reply" else "the first token"
        return (
            f"With layers {_named(self.best.advised.shares)}, {goal} would take {format_seconds(sooner)} instead of"
            f" {format_seconds(now)}, but not all of them are stored there ({lacking} missing):"
            f" {deploy_command(model, self.lacking, self.workers or {})}"
        )

    @property
    def sentences(self) -> list[str]:
        """The plan in sentences: the choice, what takes over behind the reply, and what is done once before that."""
        moves = "" if self.phases is None else self.phases.sentence
        following = self.phases.following if self.phases is not None and moves else ()
        once = first_cut(self.home.model, [*self.shares, *following], self.home.devices)
        here = "" if self.plan is self.best else "With the layers that the devices have: "
        return [one for one in (here + (self.plan.choice if moves else self.plan.advice), moves, once) if one]

    def why(self) -> list[tuple[str, str]]:
        """Return the reason for each device's layers, or for its having none."""
        found = [(stage.device, f"{stage.layers}: {stage.reason}") for stage in self.plan.advised.stages]
        return [*found, *self.plan.unused, *self.left_out]


def place(
    home: Home,
    workers: "Mapping[str, Worker] | None" = None,
    left_out: Sequence[tuple[str, str]] = (),
    stop: Stop = never,
) -> Placement:
    """Return the best split over the layers that the devices of the `home` have. `stop` as for `plan`. Raises
    PlanImpossible: the layers are not where there is memory for them; says what to copy where, if that helps."""
    every = frozenset(range(home.model.shape.layers))
    best: Plan | None = None
    impossible: PlanImpossible | None = None
    try:
        holding = [
            one if one.layers == ANY_LAYERS else replace(one, layers=LayersOnDevice(every, one.layers.loaded))
            for one in home.devices
        ]
        best = plan(replace(home, devices=holding), stop)
    except PlanImpossible as error:
        impossible = error
    lacking = () if best is None else tuple(missing(home.model, best.advised.shares, home.devices))
    finish = partial(Placement, home, best=best, lacking=lacking, workers=workers, left_out=tuple(left_out))
    there = {one.name: one.layers for one in home.devices}
    if best is not None and not lacking and all(there[one.name].takes(one.layers) for one in best.advised.shares):
        return finish(best.advised.shares, best)
    try:
        now = plan(home, stop)
    except PlanImpossible as error:
        if impossible is not None:
            raise impossible from None
        command = deploy_command("MODEL", lacking, workers or {}) if lacking else "edgellm mesh deploy MODEL"
        raise PlanImpossible(error.what, f"Deploy them: {command}") from None
    return finish(now.advised.shares, now)


def with_phases(placed: Placement, stop: Stop = never) -> Placement:
    """Return the placement with the course of a reply, which may begin with other shares."""
    for course in COURSES:
        if (phases := import_module(course).plan_phases(placed.home, placed.shares, stop)) is not None:
            return replace(placed, shares=phases.first, phases=phases)
    return placed


def deploy_command(model: str, lacking: Iterable[Lacking], workers: "Mapping[str, Worker]") -> str:
    """Return the `edgellm mesh deploy` command for the `lacking` layers; it does not send present layers again."""
    parts = []
    for share, _ in lacking:
        worker = workers.get(share.name)
        name = str(worker.address) if worker is not None and worker.peer is None else share.name
        parts.append(f"{name}:{share.layers}")
    return f"edgellm mesh deploy {model} --split {','.join(parts)}"


def missing(model: ModelCosts, shares: Sequence[StageShare], devices: Sequence[Device]) -> Iterable[Lacking]:
    """Yield the layers that each device lacks of its share."""
    stored = {one.name: one.layers.stored for one in devices}
    for share in shares:
        there = stored[share.name]
        layers = [] if there is None else sorted(set(share.layers) - there)
        if layers:
            size = sum(model.size(LayerRange(layer, layer + 1)) for layer in layers)
            yield share, int(size)


def first_cut(model: ModelCosts, shares: Sequence[StageShare], devices: Sequence[Device]) -> str:
    """Return a sentence on the pieces that devices cut out of the model's file once, before they load them; empty where
    nothing has to be cut."""
    cut, named, lines = {device.name: device.layers.cut for device in devices}, [], sorted(model.files or ())
    for share in shares:
        there = cut[share.name]
        pieces = [one for one in grid(share.layers, lines) if there is not None and one not in there]
        if pieces:
            named.append(f"{share.name} {sum(map(model.size, pieces)) / 1e6:,.0f} MB")
    return f"Once before that, layers are cut out of the model's file ({', '.join(named)})." if named else ""


def _named(shares: Sequence[StageShare]) -> str:
    return ", ".join(f"{share.layers} on {share.name}" for share in shares)


def model_costs(file: ModelFile) -> ModelCosts:
    """Return the costs of a model file for the planner: the real bytes of its layers, as quantised in the file. Raises
    ModelUnsupported: it is not a transformer with layers, or they cannot be cut apart."""
    header, shape = file.header, shape_of(file.header)
    weights, embedding, head = header.sizes(shape.layers)
    if not all(weights):
        missing = weights.index(0)
        raise ModelUnsupported(f"{file.path} has no weights for its layer {missing}.", "Use a complete language model.")
    table, tied = header.tensor("token_embd.weight"), header.tensor("output.weight") is None
    vocabulary = 0 if table is None else table.shape[-1]
    if tied:
        head += embedding
    cache = (shape.cache,) * shape.layers
    return ModelCosts(
        file.name, shape, tuple(weights), cache, embedding, head, tied, 2.0 * shape.d_model * vocabulary,
        frozenset(cut_points(header)), frozenset(grid_lines(header)),
    )  # fmt: skip

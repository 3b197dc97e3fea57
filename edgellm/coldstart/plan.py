"""The plan: which device holds which layers, its times next to those of other ways, the reasons, and the advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, Links
from edgellm.coldstart.planner import solve
from edgellm.coldstart.problem import (
    Cut,
    Overlap,
    Solution,
    StageTimes,
    Stop,
    Task,
    makespan,
    never,
    per_token,
    timeline,
    warm,
)
from edgellm.coldstart.problem_builder import (
    LayersOnDevice,
    best_single,
    even,
    heuristic,
    ideal_single,
    task_of,
    where_it_lies,
)
from edgellm.errors import InvalidOption, PlanImpossible
from edgellm.layer_range import LayerRange

Objective = Literal["ttft", "reply"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
WORTH = 0.05
"""The share of the best single device's time that a split must save to be advised."""


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """The part of one device: its layers, and its times in seconds from the request.

    It loads until `load_s`, waits `wait_s` for its predecessor (equation 24), is sent its input in `network_s`, which
    is over at `received_s`, computes for `compute_s` and is done at `finish_s`. `size` are the bytes of its layers.
    """

    device: str
    layers: LayerRange
    load_s: float
    wait_s: float
    network_s: float
    received_s: float
    compute_s: float
    finish_s: float
    size: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the stage for a script: layers as `first_layer` and `last_layer`, counted from 1, both included."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del fields["layers"]
        return {"first_layer": self.layers.start + 1, "last_layer": self.layers.stop, **fields}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the stage from which `to_json` made `found`."""
        fields = dict(found)
        return cls(layers=LayerRange(fields.pop("first_layer") - 1, fields.pop("last_layer")), **fields)


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A way to hold the model: seconds to the first token, seconds a further token, and seconds to the reply's end."""

    stages: tuple[PlannedStage, ...]
    ttft_s: float
    token_s: float
    reply_s: float

    @property
    def alone(self) -> bool:
        return len(self.stages) == 1

    def to_json(self) -> dict[str, Any]:
        """Return the way for a script."""
        return {
            "stages": [stage.to_json() for stage in self.stages],
            "ttft_s": self.ttft_s, "token_s": self.token_s, "reply_s": self.reply_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The best way, proved so within `gap` (a share; 0 if it is `optimal`), and others, None where they do not fit.

    `warm_single`: the best single device that has the model loaded already. `unused`: why each device that is left out
    is left out.
    """

    way: PlanOption
    optimal: bool
    gap: float
    reason: str
    advice: str
    even: PlanOption | None
    heuristic: PlanOption | None
    best_single: PlanOption | None
    ideal_single: PlanOption
    warm_single: PlanOption | None
    unused: tuple[tuple[str, str], ...]
    objective: Objective

    def seconds(self, way: PlanOption) -> float:
        """Return the time of a way that the plan's objective minimises."""
        return way.reply_s if self.objective == "reply" else way.ttft_s

    @property
    def advised(self) -> PlanOption:
        """The way that the advice recommends: the best one, or a single device if a split saves next to nothing."""
        alone = self.best_single
        if self.way.alone or alone is None or self.seconds(self.way) < (1.0 - WORTH) * self.seconds(alone):
            return self.way
        return alone


def plan(
    devices: Sequence[Device], model: ModelCosts, tokens_in: int, tokens_out: int = 0, *, objective: Objective = "ttft",
    overlap: Overlap = "streamed", links: Links | None = None, stop: Stop = never, cold: bool = True,
    kept: Mapping[str, LayersOnDevice] | None = None, reserved: float = 0.0,
) -> Plan:  # fmt: skip
    """Plan which device should hold which layers.

    The objective `ttft` minimises the time to the first token (the paper), `reply` the time to the last of
    `tokens_out`. With `cold` False, the devices have their layers loaded. `stop` is called now and then: whether to
    give up with the best plan so far. With `kept`, the layers that each device has, by its name, the plan uses only
    layers where they are, and loads no loaded layer again. `reserved`: as for `task_of`.

    Raises `InvalidOption` for options that make no sense, and `PlanImpossible` if the devices together do not hold the
    model.
    """
    if objective not in OBJECTIVES:
        raise InvalidOption(f"There is no objective named {objective!r}.", f"Choose from {', '.join(OBJECTIVES)}.")
    task = task_of(devices, model, tokens_in, tokens_out, overlap, links, reserved)
    asked = anywhere = task if cold else warm(task)
    further, beyond = max(0, tokens_out - 1), math.inf
    if kept is not None:
        asked, beyond = where_it_lies(asked, devices, model, kept, further)
    found = solve(asked, further if objective == "reply" else 0, stop)
    if found is None:
        raise _too_big(devices, task)
    if found.seconds >= beyond:
        raise _not_there(devices, task, kept or {})
    tell = partial(_way, devices, model, asked, further)
    alone = best_single(asked)
    peak = [device.flops for device in devices]
    strong = heuristic([device.speed(tokens_in) for device in devices], [device.disk for device in devices], asked)
    candidates = {"even": even(peak, asked), "heuristic": strong, "single": alone}
    ways = {name: tell(cut) if cut and makespan(asked, cut) < beyond else None for name, cut in candidates.items()}
    best = tell(found.cut)
    score = _score(objective)
    warm_cut = best_single(warm(task)) if kept is None else None
    loaded = _way(devices, model, warm(task), further, warm_cut) if warm_cut else None
    return Plan(
        best, found.optimal, found.gap, _reason(found),
        advice(best, ways["single"], ways["even"], loaded, score)
        + whole_reply(best, [way for way in ways.values() if way is not None], tokens_out, score),
        ways["even"], ways["heuristic"], ways["single"],
        _way(devices, model, anywhere, further, ideal_single(peak, task)), loaded,
        _unused(devices, asked, found, kept), objective,
    )  # fmt: skip


def foreseen(
    devices: Sequence[Device], model: ModelCosts, cut: Cut, tokens_in: int, tokens_out: int, *,
    overlap: Overlap = "streamed", links: Links | None = None, cold: bool = True,
) -> PlanOption:  # fmt: skip
    """Return the times of a reply with the layers divided as in `cut`, whether or not that is a good plan.

    Raises InvalidOption for numbers that make no sense."""
    task = task_of(devices, model, tokens_in, tokens_out, overlap, links)
    return _way(devices, model, task if cold else warm(task), max(0, tokens_out - 1), cut)


def _score(objective: Objective) -> Callable[[PlanOption], float]:
    return (lambda way: way.reply_s) if objective == "reply" else (lambda way: way.ttft_s)


def _way(devices: Sequence[Device], model: ModelCosts, task: Task, further: int, cut: Cut) -> PlanOption:
    ttft, token = makespan(task, cut), per_token(task, cut)
    stages = []
    spans = timeline(task, cut)
    for at, span in enumerate(spans):
        size = sum(model.layer_bytes[span.layers.start : span.layers.stop])
        size += model.embedding * (span.layers.start == 0) + model.head * (span.layers.stop == task.layers)
        if len(cut) == 1:
            size = model.bytes
        stages.append(
            PlannedStage(
                devices[span.device].name, span.layers, span.load, span.wait, span.network, span.received,
                span.compute, span.finish, size, _why(task, span, at, len(cut)),
            )
        )  # fmt: skip
    return PlanOption(tuple(stages), ttft, token, ttft + further * token)


def _why(task: Task, span: StageTimes, at: int, stages: int) -> str:
    """Return what limits the size of a stage, the one at place `at` of `stages`."""
    if stages == 1:
        return "holds everything"
    start, stop = span.layers.start, span.layers.stop
    room = float(task.room[span.device] - task.need[start:stop].sum())
    if room < task.need[max(0, start - 1) : stop + 1].max():
        return "its memory is full"
    if at == 0:
        return "first: its part is loaded soonest"
    return "its load is hidden behind the others" if span.wait > 0.0 else "its disk sets the pace"


def _reason(found: Solution) -> str:
    if found.optimal:
        return "proved: no other plan is faster"
    return f"the time was over: a plan up to {found.gap:.1%} faster may exist"


def _unused(
    devices: Sequence[Device], task: Task, found: Solution, kept: Mapping[str, LayersOnDevice] | None
) -> tuple[tuple[str, str], ...]:
    """Return the reason for each device that is left out."""
    reasons = []
    for at in sorted(set(range(len(devices))) - {device for device, _ in found.cut}):
        has = LayersOnDevice() if kept is None else kept.get(devices[at].name, LayersOnDevice(frozenset()))
        if has.disk is not None and not has.disk:
            why = "it has no layers of the model"
        elif task.room[at] < task.need.min():
            have, least = max(0.0, task.room[at]) / 1e6, task.need.min() / 1e6
            why = f"it has {have:.0f} MB for layers, and one takes {least:.0f} MB"
        else:
            why = "no plan with it is faster" if found.optimal else "no faster plan with it was found"
        reasons.append((devices[at].name, why))
    return tuple(reasons)


def _not_there(devices: Sequence[Device], task: Task, kept: Mapping[str, LayersOnDevice]) -> PlanImpossible:
    """Return the error for devices that could hold the model, but do not have enough of its layers."""
    listed = []
    for device, room in zip(devices, task.room, strict=True):
        disk = kept.get(device.name, LayersOnDevice(frozenset())).disk
        has = task.layers if disk is None else len(disk)
        listed.append(f"{device.name} has {has} of {task.layers} and {max(0.0, room) / 1e9:.1f} GB of memory")
    return PlanImpossible(
        f"The layers do not lie where they fit: {'; '.join(listed)}.", "Bring them there: edgellm mesh deploy MODEL"
    )


def _too_big(devices: Sequence[Device], task: Task) -> PlanImpossible:
    have, need = float(task.room.clip(min=0.0).sum()), float(task.need.sum())
    listed = ", ".join(
        f"{device.name} {max(0.0, room) / 1e9:.1f}" for device, room in zip(devices, task.room, strict=True)
    )
    if have >= need:
        return PlanImpossible(
            f"The model needs {need / 1e9:.1f} GB with its cache, and no way to cut it fits the devices ({listed} GB).",
            "Free some memory on one of them, or choose a smaller model or quantisation.",
        )
    return PlanImpossible(
        f"The model needs {need / 1e9:.1f} GB with its cache, and the devices have {have / 1e9:.1f} GB ({listed}).",
        "Choose a smaller model or quantisation, a shorter prompt or reply, or add a device.",
    )


def format_seconds(seconds: float) -> str:
    """Format seconds for a reader: 2.50 s, 91.7 ms."""
    return f"{seconds:.2f} s" if seconds >= 0.1 or seconds == 0.0 else f"{seconds * 1e3:.1f} ms"


def whole_reply(
    best: PlanOption, others: Sequence[PlanOption], tokens: int, score: Callable[[PlanOption], float]
) -> str:
    """Return a hint if the advised way takes longer to the end of a reply of `tokens` tokens than another way; else an
    empty string."""
    single = min((way for way in others if way.alone), key=score, default=best)
    advised = best if best.alone or score(best) < (1.0 - WORTH) * score(single) else single
    sooner = min((best, *others), key=lambda way: way.reply_s)
    if tokens < 2 or sooner.reply_s >= (1.0 - WORTH) * advised.reply_s:
        return ""
    names = " and ".join(stage.device for stage in sooner.stages) + (" alone" if sooner.alone else "")
    return (
        f" But a whole reply of {tokens} tokens then takes {format_seconds(advised.reply_s)}, and"
        f" {format_seconds(sooner.reply_s)} on {names}: plan with --objective reply."
    )


def advice(
    best: PlanOption,
    single: PlanOption | None,
    other: PlanOption | None,
    loaded: PlanOption | None,
    score: Callable[[PlanOption], float],
) -> str:
    """Return what to do, and why, in a sentence or two."""
    taken = score(best)
    if best.alone:
        name = best.stages[0].device
        rival = f"; an even split would take {format_seconds(score(other))}" if other is not None else ""
        return f"Use {name} alone: {format_seconds(taken)}, and no split is faster{rival}."
    names = ", ".join(stage.device for stage in best.stages[:-1]) + f" and {best.stages[-1].device}"
    if single is None:
        return f"Split it over {names}: {format_seconds(taken)}. No single device has the memory for it."
    name, alone = single.stages[0].device, score(single)
    saved = 1.0 - taken / alone
    if saved <= WORTH:
        return (
            f"Use {name} alone: {format_seconds(alone)}. The best split would save {format_seconds(alone - taken)}"
            f" ({saved:.1%}), which is not worth it."
        )
    words = (
        f"Split it over {names}: {format_seconds(taken)} instead of {format_seconds(alone)} on {name} alone"
        f" ({saved:.0%} less)."
    )
    if loaded is not None and score(loaded) < taken:
        name = loaded.stages[0].device
        words += (
            f" While {name} keeps it loaded, it answers alone in {format_seconds(score(loaded))}:"
            " split only when it is cold."
        )
    elif best.token_s > 1.2 * single.token_s > 0.0:
        words += (
            f" Each further token takes {format_seconds(best.token_s)} instead of {format_seconds(single.token_s)}:"
            " for long replies plan with --objective reply."
        )
    return words

"""Planning: which device holds which layers, with times, reasons, alternatives and advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, get_args

from edgellm.coldstart.algorithm1 import algorithm1, is_small
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.hardware import ANY_LAYERS, Device, Links
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
    MemoryOverhead,
    best_single,
    even,
    heuristic,
    ideal_single,
    restrict_to_stored,
    task_of,
)
from edgellm.coldstart.reply_search import fastest_reply
from edgellm.errors import InvalidOption, PlanImpossible
from edgellm.layer_range import LayerRange

Objective = Literal["ttft", "reply"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
MIN_SAVING = 0.05
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
        """Return the stage as JSON: layers as `first_layer` and `last_layer`, counted from 1, both included."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        del fields["layers"]
        return {"first_layer": self.layers.start + 1, "last_layer": self.layers.stop, **fields}

    @classmethod
    def from_json(cls, solution: Mapping[str, Any]) -> Self:
        """Return the stage that `to_json` returned as `found`."""
        fields = dict(solution)
        return cls(layers=LayerRange(fields.pop("first_layer") - 1, fields.pop("last_layer")), **fields)


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A split of the model over devices: seconds to the first token, per further token, and to the end of the reply."""

    stages: tuple[PlannedStage, ...]
    ttft_s: float
    token_s: float
    reply_s: float

    @property
    def alone(self) -> bool:
        return len(self.stages) == 1

    def to_json(self) -> dict[str, Any]:
        """Return the option as JSON."""
        return {
            "stages": [stage.to_json() for stage in self.stages],
            "ttft_s": self.ttft_s, "token_s": self.token_s, "reply_s": self.reply_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The best option, optimal to within `gap` (a share; 0 if `optimal`), and alternatives, None if they do not fit.

    `warm_single` is the best single device with the model loaded already; `unused` gives a reason for each device left
    out.
    """

    option: PlanOption
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

    def seconds(self, option: PlanOption) -> float:
        """Return the time of an option that the plan's objective minimises."""
        return option.reply_s if self.objective == "reply" else option.ttft_s

    @property
    def advised(self) -> PlanOption:
        """Return the option that the advice recommends: the best one, or a single device if a split saves next to
        nothing."""
        alone = self.best_single
        if self.option.alone or alone is None or self.seconds(self.option) < (1.0 - MIN_SAVING) * self.seconds(alone):
            return self.option
        return alone


def plan(
    devices: Sequence[Device], model: ModelCosts, tokens_in: int, tokens_out: int = 0, *, objective: Objective = "ttft",
    overlap: Overlap = "streamed", links: Links | None = None, stop: Stop = never, cold: bool = True,
    overhead: MemoryOverhead = MemoryOverhead(),
) -> Plan:  # fmt: skip
    """Return the best plan for the layers of `model`.

    The objective `ttft` minimises the time to the first token (the paper), `reply` the time to the last of
    `tokens_out`. With `cold` False, the devices have their layers loaded. `stop` is polled: whether to return the best
    plan so far. A device takes only layers that it has stored, if it says which (`Device.layers`).

    Raises:
        InvalidOption: an invalid option.
        PlanImpossible: the devices together cannot hold the model.
    """
    if objective not in OBJECTIVES:
        raise InvalidOption(f"There is no objective named {objective!r}.", f"Choose from {', '.join(OBJECTIVES)}.")
    task = task_of(devices, model, tokens_in, tokens_out, overlap, links, overhead)
    restricted = unrestricted = task if cold else warm(task)
    further, penalty = max(0, tokens_out - 1), math.inf
    anywhere = all(device.layers == ANY_LAYERS for device in devices)
    if not anywhere:
        restricted, penalty = restrict_to_stored(restricted, devices, further)
    solution = solve(restricted, further if objective == "reply" else 0, stop)
    if solution is None:
        raise _does_not_fit(devices, task)
    if solution.seconds >= penalty:
        raise _missing_layers(devices, task)
    to_option = partial(_option, devices, model, restricted, further)
    alone = best_single(restricted)
    peak = [device.flops for device in devices]
    by_strength = heuristic(
        [device.speed(tokens_in) for device in devices], [device.disk for device in devices], restricted
    )
    candidates = {"even": even(peak, restricted), "heuristic": by_strength, "single": alone}
    options = {
        name: to_option(cut) if cut and makespan(restricted, cut) < penalty else None
        for name, cut in candidates.items()
    }
    best = to_option(solution.cut)
    score = _score(objective)
    warm_cut = best_single(warm(task)) if anywhere else None
    loaded = _option(devices, model, warm(task), further, warm_cut) if warm_cut else None
    return Plan(
        best, solution.optimal, solution.gap, _reason(solution),
        advice(best, options["single"], options["even"], loaded, score)
        + reply_hint(best, [option for option in options.values() if option is not None], tokens_out, score),
        options["even"], options["heuristic"], options["single"],
        _option(devices, model, unrestricted, further, ideal_single(peak, task)), loaded,
        _unused(devices, restricted, solution), objective,
    )  # fmt: skip


def predict(
    devices: Sequence[Device], model: ModelCosts, cut: Cut, tokens_in: int, tokens_out: int, *,
    overlap: Overlap = "streamed", links: Links | None = None, cold: bool = True,
) -> PlanOption:  # fmt: skip
    """Return the times of a reply with the layers divided as in `cut`, whether or not that is a good plan.

    Raises InvalidOption for numbers that make no sense."""
    task = task_of(devices, model, tokens_in, tokens_out, overlap, links)
    return _option(devices, model, task if cold else warm(task), max(0, tokens_out - 1), cut)


def _score(objective: Objective) -> Callable[[PlanOption], float]:
    return (lambda option: option.reply_s) if objective == "reply" else (lambda option: option.ttft_s)


def _option(devices: Sequence[Device], model: ModelCosts, task: Task, further: int, cut: Cut) -> PlanOption:
    ttft, token = makespan(task, cut), per_token(task, cut)
    stages = []
    spans = timeline(task, cut)
    for place, span in enumerate(spans):
        size = sum(model.layer_bytes[span.layers.start : span.layers.stop])
        size += model.embedding * (span.layers.start == 0) + model.head * (span.layers.stop == task.layers)
        if len(cut) == 1:
            size = model.bytes
        stages.append(
            PlannedStage(
                devices[span.device].name, span.layers, span.load, span.wait, span.network, span.received,
                span.compute, span.finish, size, _stage_reason(task, span, place, len(cut)),
            )
        )  # fmt: skip
    return PlanOption(tuple(stages), ttft, token, ttft + further * token)


def _stage_reason(task: Task, span: StageTimes, place: int, stages: int) -> str:
    """Return why a stage has its size; it is at `place` of `stages`."""
    if stages == 1:
        return "holds everything"
    start, stop = span.layers.start, span.layers.stop
    capacity = float(task.capacity[span.device] - task.need[start:stop].sum())
    if capacity < task.need[max(0, start - 1) : stop + 1].max():
        return "fills its memory"
    if place == 0:
        return "first, because it loads its layers soonest"
    return "its loading is hidden by earlier stages" if span.wait > 0.0 else "limited by its disk"


def _reason(solution: Solution) -> str:
    if solution.optimal:
        return "proved optimal"
    return f"the search ran out of time: a plan up to {solution.gap:.1%} faster may exist"


def _unused(devices: Sequence[Device], task: Task, solution: Solution) -> tuple[tuple[str, str], ...]:
    """Return the reason for each device that is left out."""
    reasons = []
    for place in sorted(set(range(len(devices))) - {device for device, _ in solution.cut}):
        stored = devices[place].layers.stored
        if stored is not None and not stored:
            why = "it has no layers of the model"
        elif task.capacity[place] < task.need.min():
            have, least = max(0.0, task.capacity[place]) / 1e6, task.need.min() / 1e6
            why = f"it has {have:.0f} MB for layers, and one layer takes {least:.0f} MB"
        else:
            why = "no plan with it is faster" if solution.optimal else "no faster plan with it was found"
        reasons.append((devices[place].name, why))
    return tuple(reasons)


def _missing_layers(devices: Sequence[Device], task: Task) -> PlanImpossible:
    """Return the error for devices that could hold the model, but do not have enough of its layers."""
    listed = []
    for device, capacity in zip(devices, task.capacity, strict=True):
        stored = task.layers if device.layers.stored is None else len(device.layers.stored)
        listed.append(f"{device.name} has {stored} of {task.layers} and {max(0.0, capacity) / 1e9:.1f} GB of memory")
    return PlanImpossible(
        f"The layers are not stored where they fit: {'; '.join(listed)}.", "Send them there: edgellm mesh deploy MODEL"
    )


def _does_not_fit(devices: Sequence[Device], task: Task) -> PlanImpossible:
    have, need = float(task.capacity.clip(min=0.0).sum()), float(task.need.sum())
    listed = ", ".join(
        f"{device.name} {max(0.0, capacity) / 1e9:.1f}" for device, capacity in zip(devices, task.capacity, strict=True)
    )
    if have >= need:
        return PlanImpossible(
            f"The model needs {need / 1e9:.1f} GB with its cache, and no split of it fits the devices ({listed} GB).",
            "Free memory on one of them, or choose a smaller model or quantisation.",
        )
    return PlanImpossible(
        f"The model needs {need / 1e9:.1f} GB with its cache, and the devices have {have / 1e9:.1f} GB ({listed}).",
        "Choose a smaller model or quantisation, a shorter context, prompt or reply, or add a device.",
    )


def format_seconds(seconds: float) -> str:
    """Format seconds for a reader: 2.50 s, 91.7 ms."""
    return f"{seconds:.2f} s" if seconds >= 0.1 or seconds == 0.0 else f"{seconds * 1e3:.1f} ms"


def reply_hint(
    best: PlanOption, others: Sequence[PlanOption], tokens: int, score: Callable[[PlanOption], float]
) -> str:
    """Return a hint if another option completes a reply of `tokens` tokens sooner than the advised one; else ""."""
    single = min((option for option in others if option.alone), key=score, default=best)
    advised = best if best.alone or score(best) < (1.0 - MIN_SAVING) * score(single) else single
    fastest = min((best, *others), key=lambda option: option.reply_s)
    if tokens < 2 or fastest.reply_s >= (1.0 - MIN_SAVING) * advised.reply_s:
        return ""
    names = " and ".join(stage.device for stage in fastest.stages) + (" alone" if fastest.alone else "")
    return (
        f" But a whole reply of {tokens} tokens then takes {format_seconds(advised.reply_s)}, against"
        f" {format_seconds(fastest.reply_s)} on {names}: to minimise that, plan with --objective reply."
    )


def advice(
    best: PlanOption,
    single: PlanOption | None,
    other: PlanOption | None,
    loaded: PlanOption | None,
    score: Callable[[PlanOption], float],
) -> str:
    """Return the recommendation and its reason, in a sentence or two."""
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
    if saved <= MIN_SAVING:
        return (
            f"Use {name} alone: {format_seconds(alone)}. The best split would save {format_seconds(alone - taken)}"
            f" ({saved:.1%}), which is not worth it."
        )
    text = (
        f"Split it over {names}: {format_seconds(taken)} instead of {format_seconds(alone)} on {name} alone"
        f" ({saved:.0%} less)."
    )
    if loaded is not None and score(loaded) < taken:
        name = loaded.stages[0].device
        text += (
            f" While the model stays loaded on {name}, {name} alone answers in {format_seconds(score(loaded))}:"
            " split only for a cold start."
        )
    elif best.token_s > 1.2 * single.token_s > 0.0:
        text += (
            f" Each further token takes {format_seconds(best.token_s)} instead of {format_seconds(single.token_s)}:"
            " for long replies plan with --objective reply."
        )
    return text


def solve(task: Task, further: int = 0, stop: Stop = never) -> Solution | None:
    """Return the plan that is done first with the first token, or with `further` tokens after it; None if none fits.

    For the first token: the paper's Algorithm 1 in a small home, and in a larger one a search that proves as much in
    less time. Whole replies, and devices on which a stage may not begin and end anywhere, have a search of their own.
    """
    if not further and is_small(task):
        solution = algorithm1(task)
        return None if solution is None else Solution(solution[1], solution[0], solution[0])
    if further or task.bounded:
        return fastest_reply(task, further, stop)
    return fastest_first_token(task, stop)

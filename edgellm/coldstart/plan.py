"""Planning: the layers of each device, with times, reasons, alternatives and advice; and the parts of a prompt.

In a pipelined prefill a prompt is split into parts, and while a stage computes a part, the next stage computes the part
before. Smaller parts fill the pipeline sooner but use each device less efficiently (equation 8).
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgellm.coldstart.costs import ANY_LAYERS
from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.problem import (
    Cut,
    Home,
    Solution,
    StageTimes,
    Stop,
    Task,
    best_single,
    even,
    heuristic,
    ideal_single,
    makespan,
    never,
    per_token,
    restrict_to_stored,
    timeline,
    warm,
)
from edgellm.coldstart.reply_search import fastest_reply
from edgellm.errors import PlanImpossible
from edgellm.layer_range import StageShare

MIN_SAVING = 0.05
"""The share of the best single device's time that a split must save to be advised."""


@dataclass(frozen=True, slots=True)
class PlannedStage(StageTimes):
    """The part of one device; `size` are the bytes of its layers."""

    device: str
    size: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the stage as JSON, layers as in `StageShare.to_json`."""
        others = {name: value for name, value in asdict(self).items() if name not in ("layers", "size")}
        return StageShare(self.device, self.layers).to_json() | others | {"bytes": int(self.size)}


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

    @property
    def shares(self) -> tuple[StageShare, ...]:
        """The layers of each device."""
        return tuple(StageShare(stage.device, stage.layers) for stage in self.stages)

    @property
    def names(self) -> str:
        """The names of the devices, for a sentence."""
        *others, last = (stage.device for stage in self.stages)
        return f"{', '.join(others)} and {last}" if others else last

    def to_json(self) -> dict[str, Any]:
        """Return the option as JSON."""
        return {
            "stages": [stage.to_json() for stage in self.stages],
            "ttft_s": self.ttft_s, "token_s": self.token_s, "reply_s": self.reply_s,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The best `option` for a `home`, and alternatives, None if they do not fit.

    No other plan is faster by more than `gap`, a share. `warm_single` is the best single device with the model loaded
    already; `unused` gives a reason for each device left out.
    """

    home: Home
    option: PlanOption
    gap: float
    even: PlanOption | None
    heuristic: PlanOption | None
    best_single: PlanOption | None
    ideal_single: PlanOption
    warm_single: PlanOption | None
    unused: tuple[tuple[str, str], ...]

    @property
    def optimal(self) -> bool:
        """Return whether it is proved that no plan is faster."""
        return self.gap == 0.0

    @property
    def reason(self) -> str:
        """The plan's quality."""
        if self.optimal:
            return "proved optimal"
        return f"the search ran out of time: a plan up to {self.gap:.1%} faster may exist"

    def seconds(self, option: PlanOption) -> float:
        """Return the time of an option that the plan's objective minimises."""
        return option.reply_s if self.home.objective == "reply" else option.ttft_s

    @property
    def advised(self) -> PlanOption:
        """The recommended option: the best option, or a single device if a split saves next to nothing."""
        alone = self.best_single
        if self.option.alone or alone is None or self.seconds(self.option) < (1.0 - MIN_SAVING) * self.seconds(alone):
            return self.option
        return alone

    @property
    def idle(self) -> tuple[tuple[str, str], ...]:
        """The devices without a part in the recommended option, each with the reason."""
        part = {share.name for share in self.advised.shares}
        split = [(share.name, "a split would hardly be faster") for share in self.option.shares]
        return tuple((name, why) for name, why in (*split, *self.unused) if name not in part)

    @property
    def advice(self) -> str:
        """The recommendation and its reason, with hints at other objectives."""
        return self.choice + self._later_hint() + self._reply_hint()

    @property
    def choice(self) -> str:
        """The recommendation and its reason."""
        best, alone = self.option, self.best_single
        taken = format_seconds(self.seconds(best))
        if best.alone:
            rival = f"; an even split would take {format_seconds(self.seconds(self.even))}" if self.even else ""
            return f"Use {best.names} alone: {taken}, and no split is faster{rival}."
        if alone is None:
            return f"Split it over {best.names}: {taken}. No single device has the memory for it."
        saved = self.seconds(alone) - self.seconds(best)
        share = saved / self.seconds(alone)
        if self.advised is alone:
            return (
                f"Use {alone.names} alone: {format_seconds(self.seconds(alone))}. The best split would save"
                f" {format_seconds(saved)} ({share:.1%}), which is not worth it."
            )
        return (
            f"Split it over {best.names}: {taken} instead of {format_seconds(self.seconds(alone))} on"
            f" {alone.names} alone ({share:.0%} less)."
        )

    def _later_hint(self) -> str:
        """Return when the best single device beats a split: once it has loaded; else ""."""
        single, loaded = self.best_single, self.warm_single
        if self.option.alone or single is None or loaded is None or self.advised is single:
            return ""
        if self.seconds(loaded) >= self.seconds(self.option):
            return ""
        return (
            f" While the model stays loaded on {loaded.names}, {loaded.names} alone answers in"
            f" {format_seconds(self.seconds(loaded))}: split only for a cold start."
        )

    def _reply_hint(self) -> str:
        """Return a hint if another option completes the whole reply sooner than the advised option; else ""."""
        others = [option for option in (self.even, self.heuristic, self.best_single) if option is not None]
        fastest = min((self.option, *others), key=lambda option: option.reply_s)
        if self.home.tokens_out < 2 or fastest.reply_s >= (1.0 - MIN_SAVING) * self.advised.reply_s:
            return ""
        names = " and ".join(stage.device for stage in fastest.stages) + (" alone" if fastest.alone else "")
        return (
            f" But a whole reply of {self.home.tokens_out} tokens then takes {format_seconds(self.advised.reply_s)},"
            f" against {format_seconds(fastest.reply_s)} on {names}: to minimise that, plan with --objective reply."
        )


def plan(home: Home, stop: Stop = never) -> Plan:
    """Return the best plan, or once `stop`, which is polled, returns True, the best plan so far. A device takes only
    layers that it has stored, if it says which (`Device.layers`). Raises PlanImpossible: the devices together cannot
    hold the model, or do not have its layers where they fit."""
    free = home.task()
    task = restrict_to_stored(free, home.devices)
    solution = solve(task, home.further if home.objective == "reply" else 0, stop)
    if solution is None:
        raise _does_not_fit(home, free) if solve(free, 0, stop) is None else _missing_layers(home, free)

    def possible(cut: Cut | None) -> PlanOption | None:
        return _option(home, task, cut) if cut else None

    peak, disk = [device.flops for device in home.devices], [device.disk for device in home.devices]
    anywhere = all(device.layers == ANY_LAYERS for device in home.devices)
    loaded = best_single(warm(free)) if anywhere else None
    return Plan(
        home,
        _option(home, task, solution.cut),
        solution.gap,
        possible(even(peak, task)),
        possible(heuristic([device.speed(home.tokens_in) for device in home.devices], disk, task)),
        possible(best_single(task)),
        _option(home, free, ideal_single(peak, free)),
        None if loaded is None else _option(home, warm(free), loaded),
        _unused(home, task, solution),
    )


def predict(home: Home, cut: Cut) -> PlanOption:
    """Return the times of a reply with the layers divided as in `cut`, whether or not that is a good plan. As in a
    plan, loaded layers are not loaded again."""
    free = home.task()
    task = restrict_to_stored(free, home.devices)
    return _option(home, task if math.isfinite(makespan(task, cut)) else free, cut)


def solve(task: Task, further: int = 0, stop: Stop = never) -> Solution | None:
    """Return the plan that is done first with the first token, or with `further` tokens after it; None if none fits."""
    return fastest_reply(task, further, stop) if further else fastest_first_token(task, stop)


def _option(home: Home, task: Task, cut: Cut) -> PlanOption:
    model = home.model
    ttft, token = makespan(task, cut), per_token(task, cut)
    stages = []
    for place, (span, (device, _)) in enumerate(zip(timeline(task, cut), cut, strict=True)):
        times = {name: getattr(span, name) for name in StageTimes.__slots__}
        size, why = model.bytes if len(cut) == 1 else model.size(span.layers), _why(task, span, cut, place)
        stages.append(PlannedStage(**times, device=home.devices[device].name, size=size, reason=why))
    return PlanOption(tuple(stages), ttft, token, ttft + home.further * token)


def _why(task: Task, span: StageTimes, cut: Cut, place: int) -> str:
    """Return why the stage at this place of `cut` has its size."""
    if len(cut) == 1:
        return "holds everything"
    start, stop = span.layers.start, span.layers.stop
    capacity = float(task.capacity[cut[place][0]] - task.need[start:stop].sum())
    if capacity < task.need[max(0, start - 1) : stop + 1].max():
        return "fills its memory"
    if place == 0:
        return "first, because it loads its layers soonest"
    return "its loading is hidden by earlier stages" if span.wait_s > 0.0 else "limited by its disk"


def _unused(home: Home, task: Task, solution: Solution) -> tuple[tuple[str, str], ...]:
    """Return the reason for each device that is left out."""
    reasons = []
    for place in sorted(set(range(len(home.devices))) - {device for device, _ in solution.cut}):
        stored = home.devices[place].layers.stored
        if stored is not None and not stored:
            why = "it has no layers of the model"
        elif task.capacity[place] < task.need.min():
            have, least = max(0.0, task.capacity[place]) / 1e6, task.need.min() / 1e6
            why = f"it has {have:.0f} MB for layers, and one layer takes {least:.0f} MB"
        else:
            why = "no plan with it is faster" if solution.optimal else "no faster plan with it was found"
        reasons.append((home.devices[place].name, why))
    return tuple(reasons)


def _missing_layers(home: Home, task: Task) -> PlanImpossible:
    """Return the error for devices that could hold the model, but do not have enough of its layers."""
    listed = []
    for device, capacity in zip(home.devices, task.capacity, strict=True):
        stored = task.layers if device.layers.stored is None else len(device.layers.stored)
        listed.append(f"{device.name} has {stored} of {task.layers} and {max(0.0, capacity) / 1e9:.1f} GB of memory")
    return PlanImpossible(
        f"The layers are not stored where they fit: {'; '.join(listed)}.", "Send them there: edgellm mesh deploy MODEL"
    )


def _does_not_fit(home: Home, task: Task) -> PlanImpossible:
    have, need = float(task.capacity.clip(min=0.0).sum()), float(task.need.sum())
    listed = ", ".join(
        f"{name} {max(0.0, capacity) / 1e9:.1f}" for name, capacity in zip(home.names, task.capacity, strict=True)
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


PART_SIZES = (256, 128, 64, 32)
"""Tokens per part that are tried. A layer would not compute longer parts any faster."""


def choose_part(home: Home, cut: Cut) -> int:
    """Return the tokens of a part with the least time to the first token; the longest of about equal ones."""
    found = {size: time_by_parts(home, cut, size) for size in PART_SIZES}
    return min(PART_SIZES, key=lambda size: round(found[size] / found[PART_SIZES[0]], 2))


def time_by_parts(home: Home, cut: Cut, size: int) -> float:
    """Return the seconds from the request until the last stage has computed the last part: the first part goes through
    all stages, and the slowest stage, or link, holds up each part behind it."""
    more = max(0.0, home.tokens_in / size - 1.0)
    spans = timeline(replace(home, tokens_in=min(size, home.tokens_in)).task(), cut)
    return spans[-1].finish_s + more * max(max(span.compute_s, span.network_s) for span in spans)

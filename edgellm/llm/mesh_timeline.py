"""The timeline of a reply over several devices, beside its plan, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgellm.coldstart.plan import PlannedStage, PlanOption, format_seconds
from edgellm.errors import InvalidOption
from edgellm.layer_range import HERE, LayerRange
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.mesh.fleet_profiler import disproved, doubt_figures
from edgellm.mesh.pipeline import StageRecord
from edgellm.rpc.discovery.workers import Worker
from edgellm.spec.types import Summary

if TYPE_CHECKING:
    from edgellm.coldstart.plan import Plan, PlanOption


_KEYS = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """The measured work of one device, in seconds from the request: when it loaded, computed and received."""

    device: str
    layers: LayerRange
    loading: tuple[tuple[float, float], ...]
    computing: tuple[tuple[float, float], ...]
    got: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A reply as measured: until the first token, stage by stage, and the time of each further token. `disproved`: a
    sentence for each figure that the reply has shown to be wrong, which is measured again before the next plan."""

    way: PlanOption
    did: tuple[DeviceTimeline, ...]
    disproved: tuple[str, ...] = ()


def measured(opened: OpenedMesh, since: float, ttft: float, tokens: int, seconds: float) -> Measured:
    """Return what the stages did for the reply that has just ended; call it once per reply.

    `since` is when the reply began, by `perf_counter`; the first token came after `ttft` seconds, and the last of
    `tokens` after `seconds`."""
    did = [_did(record, since) for record in opened.verifier.measured()]
    stages: list[PlannedStage] = []
    before = 0.0
    for one in did:
        load = max((end for begin, end in one.loading if begin < ttft), default=0.0)
        computing = [(begin, min(end, ttft)) for begin, end in one.computing if begin < ttft]
        finish = max((end for _, end in computing), default=load)
        got = max((moment for moment in one.got if moment < ttft), default=before)
        network = max(0.0, got - before) if stages else 0.0
        compute = sum(end - begin for begin, end in computing)
        wait = max(0.0, got - max(load, 0.0))
        size = sum(opened.model.layer_bytes[one.layers.start : one.layers.stop])
        stages.append(PlannedStage(one.device, one.layers, load, wait, network, got, compute, finish, size, "measured"))
        before = finish
    token = (seconds - ttft) / (tokens - 1) if tokens > 1 else 0.0
    return Measured(PlanOption(tuple(stages), ttft, token, seconds), tuple(did))


def _did(record: StageRecord, began: float) -> DeviceTimeline:
    shift = record.clock.began - began

    def of(kind: str) -> tuple[tuple[float, float], ...]:
        spans = ((span.begin + shift, span.end + shift) for span in record.spans if span.kind == kind)
        return tuple((max(0.0, begin), end) for begin, end in spans if end >= 0.0)  # it may report earlier work late

    work = record.work
    got = tuple(begin for begin, _ in of("got"))
    return DeviceTimeline(record.host.name, work.layers, of("load"), of("compute"), got)


def planned_for(stage: PlannedStage, plan: PlanOption | None) -> PlannedStage | None:
    """Return what the plan says of a stage; None where there is no plan, or another device has taken over."""
    for one in plan.stages if plan is not None else ():
        if (one.device, one.layers) == (stage.device, stage.layers):
            return one
    return None


def disproved_by(found: PlanOption, plan: PlanOption | None, workers: Mapping[str, Worker]) -> tuple[str, ...]:
    """Mark the figures that a reply has disproved, of this device and the `workers`, to be measured again; return a
    sentence for each."""
    sentences = []
    for stage in found.stages:
        planned, worker = planned_for(stage, plan), workers.get(stage.device)
        if planned is None or (worker is None and stage.device != HERE):
            continue
        for what, took, expected in disproved(stage, planned):
            if doubt_figures(worker, what):
                sentences.append(
                    f"{stage.device}: {what} took {format_seconds(took)}, not {format_seconds(expected)} as"
                    " planned: its figures are wrong, and are measured again before the next plan."
                )
    return tuple(sentences)


def beside(found: PlanOption | None, plan: PlanOption | None, disproved: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was measured and what was planned, for a script or the page; None for what is missing, layers counted
    from 1. At least one of the two is given. `disproved`: as in `Measured`."""
    shown = found or plan
    return {
        "ttft_s": None if found is None else found.ttft_s, "token_s": None if found is None else found.token_s,
        "planned_ttft_s": None if plan is None else plan.ttft_s,
        "planned_token_s": None if plan is None else plan.token_s,
        "stages": [
            {"device": one.device, "first_layer": one.layers.start + 1, "last_layer": one.layers.stop,
             "measured": None if found is None else _numbers(one), "planned": _numbers(planned_for(one, plan))}
            for one in (() if shown is None else shown.stages)
        ],
        "disproved": list(disproved),
    }  # fmt: skip


def _numbers(stage: PlannedStage | None) -> dict[str, float] | None:
    return None if stage is None else {key: getattr(stage, key) for key in _KEYS}


class Replies:
    """The measured replies of one mesh, one at a time.

    The first reply counts from when the devices began to load, later ones from their request."""

    def __init__(self, opened: OpenedMesh) -> None:
        self._opened = opened
        self._since: float | None = opened.began
        self._asked = perf_counter()

    @property
    def stands(self) -> bool:
        """Whether all layers are loaded before the first request, so that its reply does not wait for them."""
        pipeline = self._opened.verifier.mesh.current()
        records = [] if pipeline is None else pipeline.records
        return self._since is not None and all(record.whole for record in records)

    def asked(self, anew: bool = False) -> None:
        """Note that a reply begins. `anew`: disregard all work before it."""
        if anew:
            self._opened.verifier.measured()
            self._since = None
        self._asked = perf_counter()

    def heard(self, summary: Summary) -> tuple[Measured, PlanOption | None] | None:
        """Return what was done for the reply that has ended and what was planned for one like it, by `measured` and
        `OpenedMesh.foreseen`; None for a reply without a token."""
        cold, since = self._since is not None, self._since or self._asked
        self._since = None
        if summary.first_at is None:
            return None
        rest = (summary.tokens - 1) / summary.tokens_per_second if summary.tokens_per_second else 0.0
        ttft = summary.first_at - since  # the reply's own clock starts later than either
        found = measured(self._opened, since, ttft, summary.tokens, ttft + rest)
        plan = self._opened.foreseen(summary.prompt_tokens, summary.tokens, cold=cold)
        if self._opened.workers is not None:
            found = replace(found, disproved=disproved_by(found.way, plan, self._opened.workers))
        return found, plan


COLOURS = {"load": "#e8b04a", "wait": "#d9d9d9", "network": "#a45a92", "compute": "#479a63"}


def save(plan: Plan, name: str, path: Path) -> None:
    """Draw the plan, and below it the best single device and the even split, on one scale of time.

    Raises `InvalidOption` where matplotlib is missing, and `OSError` where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidOption("Pictures need matplotlib.", "Install it with: pip install 'edgellm[plots]'") from None
    ways = [("this plan", plan.way), ("best single device", plan.best_single), ("even split", plan.even)]
    there = [(what, way) for what, way in ways if way is not None]
    if plan.way.alone:
        there = [each for each in there if each[0] != "best single device"]
    heights = [len(way.stages) + 1.2 for _, way in there]
    figure: Any = Figure(figsize=(8.0, 0.8 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(there), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (what, way) in zip(panels, there, strict=True):
        lanes(axes, way, f"{what}: first token after {way.ttft_s:.2f} s")
    panels[-1].set_xlim(0.0, 1.02 * max(way.ttft_s for _, way in there))
    panels[-1].set_xlabel("seconds from the request")
    figure.suptitle(name)
    key(figure)
    figure.savefig(path, dpi=130)


def lanes(axes: Any, way: PlanOption, title: str) -> None:
    """Draw one way to hold the model on the given axes: loading above waiting, receiving and computing."""
    for lane, stage in enumerate(way.stages):
        begin = stage.finish_s - stage.compute_s
        sent = stage.received_s - stage.network_s
        _bar(axes, lane - 0.2, 0.0, stage.load_s, "load")
        _bar(axes, lane + 0.2, min(stage.load_s, begin), begin, "wait")
        _bar(axes, lane + 0.2, sent, stage.received_s, "network")
        _bar(axes, lane + 0.2, begin, stage.finish_s, "compute")
    labels = [f"{stage.device}\n{stage.layers}" for stage in way.stages]
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.axvline(way.ttft_s, color="black", lw=1.0)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def key(figure: Any) -> None:
    """Add a legend of the colours."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def _bar(axes: Any, lane: float, begin: float, end: float, kind: str) -> None:
    if end > begin:
        axes.barh(lane, end - begin, left=begin, height=0.38, color=COLOURS[kind])

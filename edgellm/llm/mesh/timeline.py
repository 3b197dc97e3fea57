"""The measured times of a reply over several devices, to compare with the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from edgellm.coldstart.plan import PlannedStage, Way, told
from edgellm.layer_range import LayerRange
from edgellm.llm.mesh.mesh_llm import Opened
from edgellm.mesh.placement.split import HERE
from edgellm.mesh.profiling.doubts import disproved
from edgellm.mesh.profiling.fleet_profiler import doubt_figures
from edgellm.mesh.runtime.pipeline import Lane
from edgellm.rpc.discovery.workers import Worker
from edgellm.spec.types import Summary

_KEYS = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")


@dataclass(frozen=True, slots=True)
class Did:
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

    way: Way
    did: tuple[Did, ...]
    disproved: tuple[str, ...] = ()


def measured(opened: Opened, since: float, ttft: float, tokens: int, seconds: float) -> Measured:
    """Return what the stages did for the reply that has just ended; call it once per reply.

    `since` is when the reply began, by `perf_counter`; the first token came after `ttft` seconds, and the last of
    `tokens` after `seconds`."""
    did = [_did(lane, since) for lane in opened.verifier.measured()]
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
    return Measured(Way(tuple(stages), ttft, token, seconds), tuple(did))


def _did(lane: Lane, began: float) -> Did:
    shift = lane.clock.began - began

    def of(kind: str) -> tuple[tuple[float, float], ...]:
        spans = ((span.begin + shift, span.end + shift) for span in lane.spans if span.kind == kind)
        return tuple((max(0.0, begin), end) for begin, end in spans if end >= 0.0)  # it may report earlier work late

    work = lane.work
    got = tuple(begin for begin, _ in of("got"))
    return Did(lane.seat.name, work.layers, of("load"), of("compute"), got)


def planned_for(stage: PlannedStage, plan: Way | None) -> PlannedStage | None:
    """Return what the plan says of a stage; None where there is no plan, or another device has taken over."""
    for one in plan.stages if plan is not None else ():
        if (one.device, one.layers) == (stage.device, stage.layers):
            return one
    return None


def disproved_by(found: Way, plan: Way | None, workers: Mapping[str, Worker]) -> tuple[str, ...]:
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
                    f"{stage.device}: {what} took {told(took)} and not {told(expected)} as planned: the figures of it"
                    " are wrong, and are measured again before the next plan."
                )
    return tuple(sentences)


def beside(found: Way | None, plan: Way | None, disproved: Sequence[str] = ()) -> dict[str, Any]:
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

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._since: float | None = opened.began
        self._asked = perf_counter()

    @property
    def stands(self) -> bool:
        """Whether all layers are loaded before the first request, so that its reply does not wait for them."""
        pipeline = self._opened.verifier.mesh.current()
        lanes = [] if pipeline is None else pipeline.lanes
        return self._since is not None and all(lane.whole for lane in lanes)

    def asked(self, anew: bool = False) -> None:
        """Note that a reply begins. `anew`: disregard all work before it."""
        if anew:
            self._opened.verifier.measured()
            self._since = None
        self._asked = perf_counter()

    def heard(self, summary: Summary) -> tuple[Measured, Way | None] | None:
        """Return what was done for the reply that has ended and what was planned for one like it, by `measured` and
        `Opened.foreseen`; None for a reply without a token."""
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

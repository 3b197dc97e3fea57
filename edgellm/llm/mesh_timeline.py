"""The measured timeline of a reply over several devices, compared with its plan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import LayerRange, StageShare
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.mesh.pipeline import StageRecord
from edgellm.spec.stats import Summary

if TYPE_CHECKING:
    from edgellm.coldstart.phases import Move
    from edgellm.mesh.coordinator import TakeOver


_KEYS = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """The measured work of one device, in seconds from the request: when it cut layers from a model's file, loaded,
    computed and received."""

    device: str
    layers: LayerRange
    cutting: tuple[tuple[float, float], ...]
    loading: tuple[tuple[float, float], ...]
    computing: tuple[tuple[float, float], ...]
    got: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MeasuredMove:
    """A placement that took over in a reply: after `token` tokens, `at` seconds from the request, having `loaded` and
    read the text (`ready`); and the `planned` move, if any."""

    shares: tuple[StageShare, ...]
    token: int
    loaded: float
    ready: float
    at: float
    planned: Move | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured reply: until the first token, stage by stage, and the time of each further token.

    A reply in phases has `moves`, and neither stages nor timelines: its first placement is gone."""

    option: PlanOption
    timelines: tuple[DeviceTimeline, ...]
    moves: tuple[MeasuredMove, ...] = ()


def _device_timelines(record: StageRecord, began: float) -> DeviceTimeline:
    def of(kind: str) -> tuple[tuple[float, float], ...]:
        shift = record.began - began
        spans = ((span.begin + shift, span.end + shift) for span in record.spans if span.kind == kind)
        return tuple((max(0.0, begin), end) for begin, end in spans if end >= 0.0)  # Earlier work may be reported late.

    got = tuple(begin for begin, _ in of("got"))
    return DeviceTimeline(record.host.name, record.work.layers, of("cut"), of("load"), of("compute"), got)


def planned_for(stage: PlannedStage, plan: PlanOption | None) -> PlannedStage | None:
    """Return the planned times of a stage, if the plan has that stage."""
    for one in plan.stages if plan is not None else ():
        if (one.device, one.layers) == (stage.device, stage.layers):
            return one
    return None


def comparison(found: Measured | None, plan: PlanOption | None) -> dict[str, Any]:
    """Return measured and planned times as JSON, None for missing times, layers counted from 1. At least one of both is
    given. A reply in phases also has its moves and its end."""
    did = None if found is None else found.option
    shown, moves = did or plan, () if found is None else found.moves

    def times(*keys: str) -> dict[str, float | None]:
        both = (("", did), ("planned_", plan))
        return {f"{kind}{key}": None if way is None else getattr(way, key) for kind, way in both for key in keys}

    return {
        **(times("reply_s") | {"moves": [_move_numbers(one) for one in moves]} if moves else {}),
        **times("ttft_s", "token_s"),
        "stages": [
            {**StageShare(one.device, one.layers).to_json(), "measured": None if did is None else _numbers(one),
             "planned": _numbers(planned_for(one, plan))}
            for one in (() if shown is None else shown.stages)
        ],
    }  # fmt: skip


def _move_numbers(move: MeasuredMove) -> dict[str, Any]:
    planned = move.planned
    return {
        "after_token": move.token, "at_s": move.at, "loaded_s": move.loaded, "ready_s": move.ready,
        "stages": [share.to_json() for share in move.shares],
        "planned": None if planned is None else
        {"after_token": planned.token, "at_s": planned.seconds, "loaded_s": planned.loaded, "ready_s": planned.ready},
    }  # fmt: skip


def _numbers(stage: PlannedStage | None) -> dict[str, float] | None:
    return None if stage is None else {key: getattr(stage, key) for key in _KEYS}


class Replies:
    """The measured replies of one mesh, one at a time.

    The first reply counts from the beginning of loading, later replies from their request."""

    def __init__(self, opened: OpenedMesh) -> None:
        self._opened = opened
        self._since: float | None = opened.began
        self._asked = perf_counter()

    @property
    def is_loaded(self) -> bool:
        """Return whether all layers are loaded, so that the first reply's time does not include loading."""
        pipeline = self._opened.verifier.mesh.current()
        records = [] if pipeline is None else pipeline.records
        return self._since is not None and all(record.whole for record in records)

    def on_request(self, restart: bool = False) -> None:
        """Note that a reply begins. `restart`: disregard all work before it."""
        if restart:
            self._opened.verifier.measured()
            self._since = None
        self._asked = perf_counter()

    def on_reply(self, summary: Summary) -> tuple[Measured, PlanOption | None] | None:
        """Return the measured times of the finished reply, and the plan of a similar one (`OpenedMesh.predict`); None
        for a reply without a token."""
        cold, since = self._since is not None, self._since or self._asked
        self._since = None
        if summary.first_at is None:
            return None
        rest = (summary.tokens - 1) / summary.tokens_per_second if summary.tokens_per_second else 0.0
        ttft = summary.first_at - since  # The reply's own clock starts later.
        taken = [one for one in self._opened.verifier.mesh.take_overs if one.at > summary.first_at]
        if taken:
            return self._in_phases(taken, since, ttft, ttft + rest, summary, cold=cold)
        found = self._in_stages(since, ttft, summary.tokens, ttft + rest)
        return found, self._opened.predict(summary.prompt_tokens, summary.tokens, cold=cold)

    def _in_stages(self, since: float, ttft: float, tokens: int, seconds: float) -> Measured:
        """Return the stages' work in a reply whose first token came after `ttft` seconds, and the last of `tokens`
        after `seconds`."""
        timelines = [_device_timelines(record, since) for record in self._opened.verifier.measured()]
        stages: list[PlannedStage] = []
        before = 0.0
        arrivals = [[moment for moment in one.got if moment < ttft] for one in timelines]
        parts = min(
            map(len, arrivals), default=0
        )  # Clocks differ a little: the next token's part may seem to be early.
        for one, arrived in zip(timelines, arrivals, strict=True):
            load = max((end for begin, end in one.loading if begin < ttft), default=0.0)
            computing = [(begin, min(end, ttft)) for begin, end in one.computing if begin < ttft]
            finish = max((end for _, end in computing), default=load)
            got = arrived[parts - 1] if parts else before
            network = max(0.0, got - before) if stages else 0.0
            compute = sum(end - begin for begin, end in computing)
            size = self._opened.model.size(one.layers)
            stages.append(PlannedStage(
                one.layers, load, max(0.0, got - load), network, got, compute, finish, one.device, size, "measured"
            ))  # fmt: skip
            before = finish
        token = (seconds - ttft) / (tokens - 1) if tokens > 1 else 0.0
        return Measured(PlanOption(tuple(stages), ttft, token, seconds), tuple(timelines))

    def _in_phases(
        self, taken: Sequence[TakeOver], since: float, ttft: float, seconds: float, summary: Summary, *, cold: bool
    ) -> tuple[Measured, PlanOption | None]:
        """Return the measured times of a reply with the take-overs `taken`, and the plan of a similar reply."""
        self._opened.verifier.measured()  # The next reply starts without records.
        phases, tokens = self._opened.phases, summary.tokens
        plan = None if phases is None or not cold else phases.predict(summary.prompt_tokens, tokens)
        moves = tuple(
            MeasuredMove(
                one.shares, one.tokens - summary.prompt_tokens, one.loaded - since, one.ready - since, one.at - since,
                plan.move if plan is not None and at == 0 else None,
            )
            for at, one in enumerate(taken)
        )  # fmt: skip
        found = PlanOption((), ttft, (seconds - ttft) / max(1, tokens - 1), seconds)
        option = None
        if plan is not None:
            option = PlanOption((), plan.ttft, (plan.seconds - plan.ttft) / max(1, tokens - 1), plan.seconds)
        return Measured(found, (), moves=moves), option


class MeshRecorder:
    """Records the last reply of one mesh. Replies that overlap are left out: their work cannot be told apart."""

    def __init__(self, opened: OpenedMesh) -> None:
        self._opened, self._replies = opened, Replies(opened)
        self._lock = threading.Lock()
        self._running = 0
        self._overlapped = False
        self._last = None if opened.placed is None else comparison(None, opened.placed.option)

    def reply_started(self) -> None:
        """Note that a reply starts. May wait for the devices' reports on earlier replies."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                self._overlapped = True
                return
            self._replies.on_request(restart=self._overlapped or self._replies.is_loaded)
            self._overlapped = False

    def reply_finished(self, summary: Summary | None) -> None:
        """Note that a reply has finished; `summary` is None where it failed. May wait for the devices' reports."""
        with self._lock:
            self._running -= 1
            found = None if self._overlapped or summary is None else self._replies.on_reply(summary)
            if found is None:
                self._overlapped = True  # the work so far belongs to no single reply
            else:
                self._last = _with_spans(*found)

    def status(self) -> dict[str, Any]:
        """Return the layers of each device, and the last measured reply as `comparison` returns it, with each device's
        work from when to when in seconds; before the first reply, the plan."""
        holders = [share.to_json() for share in self._opened.verifier.mesh.shares]
        return {"holders": holders, "last": self._last}


def _with_spans(found: Measured, plan: PlanOption | None) -> dict[str, Any]:
    """Return `comparison`'s data, and when each device loaded and computed up to the first token."""
    until = found.option.ttft_s
    reply = comparison(found, plan)
    for stage, timeline in zip(reply["stages"], found.timelines, strict=True):
        for name, spans in (("loading", timeline.loading), ("computing", timeline.computing)):
            stage["measured"][name] = [(begin, min(end, until)) for begin, end in spans if begin < until]
    return reply

"""The measured timeline of a reply over several devices, compared with its plan."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import StageShare
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.mesh.pipeline import StageRecord
from edgellm.spec.stats import Summary

if TYPE_CHECKING:
    from edgellm.coldstart.phases import Move
    from edgellm.mesh.coordinator import TakeOver


_KEYS = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")
_KINDS = {"cutting": "cut", "loading": "load", "computing": "compute", "receiving": "got"}
Spans: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]
"""The beginnings and ends of a device's activities, in seconds from the request: when it was `cutting` layers from a
model's file, `loading`, `computing` and `receiving`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured reply: until the first token, stage by stage with the `spans` of each, and the time of each further
    token.

    A reply in phases has no stages, as its first placement is gone, but the `moves` of placements that took over, with
    seconds from the request, and tokens of the reply; the first of them was `planned`, if any was."""

    option: PlanOption
    spans: tuple[Spans, ...] = ()
    moves: tuple[TakeOver, ...] = ()
    planned: Move | None = None

    def planned_move(self, move: TakeOver) -> Move | None:
        """Return the plan of one of the moves, if there was one."""
        return self.planned if move is self.moves[0] else None


def _spans(record: StageRecord, began: float) -> Spans:
    def of(kind: str) -> list[tuple[float, float]]:
        shift = record.began - began
        spans = ((span.begin + shift, span.end + shift) for span in record.spans if span.kind == kind)
        return [(max(0.0, begin), end) for begin, end in spans if end >= 0.0]  # Earlier work may be reported late.

    return {doing: of(kind) for doing, kind in _KINDS.items()}


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
    shown, moves = did or plan, found is not None and [_move_numbers(found, one) for one in found.moves]

    def times(*keys: str) -> dict[str, float | None]:
        both = (("", did), ("planned_", plan))
        return {f"{kind}{key}": None if way is None else getattr(way, key) for kind, way in both for key in keys}

    return {
        **(times("reply_s") | {"moves": moves} if moves else {}),
        **times("ttft_s", "token_s"),
        "stages": [
            {**StageShare(one.device, one.layers).to_json(), "measured": None if did is None else _numbers(one),
             "planned": _numbers(planned_for(one, plan))}
            for one in (() if shown is None else shown.stages)
        ],
    }  # fmt: skip


def _move_numbers(found: Measured, move: TakeOver) -> dict[str, Any]:
    planned = found.planned_move(move)
    return {
        "after_token": move.tokens, "at_s": move.at, "loaded_s": move.loaded, "ready_s": move.ready,
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
        option = PlanOption((), ttft, rest / max(1, summary.tokens - 1), ttft + rest)
        records = self._opened.verifier.measured()  # The next reply starts without records.
        taken = [one for one in self._opened.verifier.mesh.take_overs if one.at > summary.first_at]
        if taken:
            return self._in_phases(option, taken, since, summary, cold=cold)
        spans = [_spans(record, since) for record in records]
        stages = self._stages(records, spans, ttft)
        plan = self._opened.predict(summary.prompt_tokens, summary.tokens, cold=cold)
        return Measured(replace(option, stages=tuple(stages)), tuple(spans)), plan

    def _stages(self, records: Sequence[StageRecord], spans: Sequence[Spans], ttft: float) -> list[PlannedStage]:
        """Return the stages' work in a reply whose first token came after `ttft` seconds."""
        stages: list[PlannedStage] = []
        before = 0.0
        arrivals = [[moment for moment, _ in one["receiving"] if moment < ttft] for one in spans]
        # Clocks differ a little: the next token's part may seem to be early.
        parts = min(map(len, arrivals), default=0)
        for record, one, arrived in zip(records, spans, arrivals, strict=True):
            load = max((end for begin, end in one["loading"] if begin < ttft), default=0.0)
            computing = [(begin, min(end, ttft)) for begin, end in one["computing"] if begin < ttft]
            finish = max((end for _, end in computing), default=load)
            got = arrived[parts - 1] if parts else before
            network = max(0.0, got - before) if stages else 0.0
            compute = sum(end - begin for begin, end in computing)
            layers = record.work.layers
            stages.append(PlannedStage(
                layers, load, max(0.0, got - load), network, got, compute, finish, record.host.name,
                self._opened.model.size(layers), "measured",
            ))  # fmt: skip
            before = finish
        return stages

    def _in_phases(
        self, option: PlanOption, taken: Sequence[TakeOver], since: float, summary: Summary, *, cold: bool
    ) -> tuple[Measured, PlanOption | None]:
        """Return the measured times of a reply with the take-overs `taken`, and the plan of a similar reply."""
        phases, tokens = self._opened.phases, summary.tokens
        moves = tuple(
            replace(one, loaded=one.loaded - since, ready=one.ready - since, at=one.at - since,
                    tokens=one.tokens - summary.prompt_tokens)
            for one in taken
        )  # fmt: skip
        if phases is None or not cold:
            return Measured(option, moves=moves), None
        plan = phases.predict(summary.prompt_tokens, tokens)
        planned = PlanOption((), plan.ttft, (plan.seconds - plan.ttft) / max(1, tokens - 1), plan.seconds)
        return Measured(option, moves=moves, planned=plan.move), planned


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
    for stage, spans in zip(reply["stages"], found.spans, strict=True):
        for doing in ("loading", "computing"):
            stage["measured"][doing] = [(begin, min(end, until)) for begin, end in spans[doing] if begin < until]
    return reply

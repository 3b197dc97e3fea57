"""The measured times of a reply over several devices, beside its plan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import StageShare
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.spec.stats import Summary

if TYPE_CHECKING:
    from edgellm.mesh.coordinator import TakeOver

_TIMES = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")


def comparison(did: PlanOption | None, plan: PlanOption | None, moves: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return measured and planned times as JSON, None for missing times, layers counted from 1. At least one of both is
    given. A reply in phases has no stages, as its first placement is gone, but its `moves` and its end."""
    shown = did or plan
    planned = {} if plan is None else {(one.device, one.layers): one for one in plan.stages}

    def times(*keys: str) -> dict[str, float | None]:
        both = (("", did), ("planned_", plan))
        return {f"{kind}{key}": None if way is None else getattr(way, key) for kind, way in both for key in keys}

    return {
        **(times("reply_s") | {"moves": moves} if moves else {}),
        **times("ttft_s", "token_s"),
        "stages": [
            {**StageShare(one.device, one.layers).to_json(), "measured": None if did is None else _numbers(one),
             "planned": _numbers(planned.get((one.device, one.layers)))}
            for one in (() if shown is None else shown.stages)
        ],
    }  # fmt: skip


def _numbers(stage: PlannedStage | None) -> dict[str, float] | None:
    return None if stage is None else {key: getattr(stage, key) for key in _TIMES}


class MeshRecorder:
    """Records the last reply of one mesh, as `comparison` returns it: the first from the beginning of loading on, later
    ones from their request on. Replies that overlap are left out: their work cannot be told apart."""

    def __init__(self, opened: OpenedMesh, *, asked: bool = False) -> None:
        """Record replies. `asked`: the first question is known already; else a reply does not count from the beginning
        of loading if all layers are loaded before its request."""
        self._opened, self._asked = opened, asked
        self._lock = threading.Lock()
        self._running = 0
        self._overlapped = False
        self._cold = True  # a reply counts from the beginning of loading
        self._since = opened.began
        self._last = None if opened.placed is None else comparison(None, opened.placed.plan.advised)

    def reply_started(self) -> None:
        """Note that a reply starts."""
        with self._lock:
            self._running += 1
            self._overlapped = self._running > 1
            if self._overlapped:
                return
            pipeline = self._opened.verifier.mesh.current()
            if pipeline is not None:
                self._cold = self._cold and (self._asked or not pipeline.whole)
                pipeline.measure()
            self._since = self._opened.began if self._cold else perf_counter()

    def reply_finished(self, summary: Summary | None) -> dict[str, Any] | None:
        """Note that a reply has finished, and return its times; None for one that cannot be told apart, that has no
        token, or, without a `summary`, that has failed."""
        with self._lock:
            self._running -= 1
            cold, self._cold = self._cold, False
            if self._overlapped or summary is None or summary.first_at is None:
                return None
            rest = (summary.tokens - 1) / summary.tokens_per_second if summary.tokens_per_second else 0.0
            ttft = summary.first_at - self._since  # The reply's own clock starts later.
            token, end = rest / max(1, summary.tokens - 1), ttft + rest
            taken = [one for one in self._opened.verifier.mesh.take_overs if one.at > summary.first_at]
            if taken:
                self._last = self._in_phases(PlanOption((), ttft, token, end), taken, summary, cold)
            else:
                plan = self._opened.predict(summary.prompt_tokens, summary.tokens, cold=cold)
                self._last = comparison(PlanOption(tuple(self._stages()), ttft, token, end), plan)
            return self._last

    def status(self) -> dict[str, Any]:
        """Return the layers of each device, and the last measured reply; before the first one, the plan."""
        holders = [share.to_json() for share in self._opened.verifier.mesh.shares]
        return {"holders": holders, "last": self._last}

    def _stages(self) -> list[PlannedStage]:
        """Return the stages' work for the first token."""
        pipeline, stages, before = self._opened.verifier.mesh.current(), list[PlannedStage](), 0.0
        for record in () if pipeline is None else pipeline.records:
            if (crossing := record.crossing) is None:
                continue
            load, received = max(0.0, record.loaded_at - self._since), crossing.received - self._since
            finish = max(load, crossing.finished - self._since)
            stages.append(PlannedStage(
                record.work.layers, load, max(0.0, received - load), max(0.0, received - before) if stages else 0.0,
                received, crossing.computing, finish, record.host.name, 0.0, "measured",
            ))  # fmt: skip
            before = finish
        return stages

    def _in_phases(self, did: PlanOption, taken: Sequence[TakeOver], summary: Summary, cold: bool) -> dict[str, Any]:
        """Return the times of a reply with the take-overs `taken`; the first of them was planned, if any was."""
        phases, tokens = self._opened.phases, summary.tokens
        plan = None if phases is None or not cold else phases.predict(summary.prompt_tokens, tokens)
        planned = None if plan is None or plan.move is None else {
            "after_token": plan.move.token, "at_s": plan.move.seconds, "loaded_s": plan.move.loaded,
            "ready_s": plan.move.ready,
        }  # fmt: skip
        moves = [
            {"after_token": one.tokens - summary.prompt_tokens, "at_s": one.at - self._since,
             "loaded_s": one.loaded - self._since, "ready_s": one.ready - self._since,
             "stages": [share.to_json() for share in one.shares], "planned": planned if one is taken[0] else None}
            for one in taken
        ]  # fmt: skip
        if plan is None:
            return comparison(did, None, moves)
        token = (plan.seconds - plan.ttft) / max(1, tokens - 1)
        return comparison(did, PlanOption((), plan.ttft, token, plan.seconds), moves)

"""What the devices of a mesh did for the last reply, beside what was planned: for the page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from edgellm.api.mesh import Opened
from edgellm.api.mesh_times import Did, Measured, Replies, planned_for
from edgellm.coldstart.plan import Stage, Way
from edgellm.spec.records import Summary

_MOST = 200  # spans of a kind that are drawn for a device
_KEYS = ("load_s", "wait_s", "network_s", "received_s", "compute_s", "finish_s")


class Course:
    """Of one mesh. Replies begin and end in threads of their own; of those that shared the devices with another one
    nothing is told, since nobody can tell what was done for which."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._replies = opened, Replies(opened)
        self._lock = threading.Lock()
        self._open = 0
        self._mixed = False
        self._last = None if opened.plan is None else _planned(opened.plan.way)

    def begins(self) -> None:
        """A reply begins. May wait for what the devices tell of those before it."""
        with self._lock:
            self._open += 1
            if self._open > 1:
                self._mixed = True
                return
            self._replies.asked(anew=self._mixed or self._replies.stands)
            self._mixed = False

    def over(self, summary: Summary | None) -> None:
        """A reply is over; None: it failed. May wait, as above."""
        with self._lock:
            self._open -= 1
            found = None if self._mixed or summary is None else self._replies.heard(summary)
            if found is None:
                self._mixed = True  # what was done so far belongs to no reply
            else:
                self._last = _drawn(*found)

    def told(self) -> dict[str, Any]:
        """Who holds which layers now, counted from 1, and the last reply that can be told of; before it the plan."""
        shares = self._opened.verifier.mesh.shares
        holders = [{"device": one.name, "first_layer": one.first + 1, "last_layer": one.last + 1} for one in shares]
        return {"holders": holders, "last": self._last}


def _planned(way: Way) -> dict[str, Any]:
    stages = [_stage(one, one, None) for one in way.stages]
    return {"ttft_s": None, "token_s": None, "planned_ttft_s": way.ttft_s, "planned_token_s": way.token_s,
            "stages": stages}  # fmt: skip


def _drawn(found: Measured, plan: Way | None) -> dict[str, Any]:
    ttft = found.way.ttft_s
    stages = []
    for stage, did in zip(found.way.stages, found.did, strict=True):
        stages.append(_stage(stage, planned_for(stage, plan), _numbers(stage) | _spans(did, ttft)))
    return {
        "ttft_s": ttft, "token_s": found.way.token_s,
        "planned_ttft_s": None if plan is None else plan.ttft_s,
        "planned_token_s": None if plan is None else plan.token_s, "stages": stages,
    }  # fmt: skip


def _stage(stage: Stage, planned: Stage | None, measured: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "device": stage.device, "first_layer": stage.first_layer, "last_layer": stage.last_layer,
        "planned": None if planned is None else _numbers(planned), "measured": measured,
    }  # fmt: skip


def _numbers(stage: Stage) -> dict[str, Any]:
    return {key: getattr(stage, key) for key in _KEYS}


def _spans(did: Did, until: float) -> dict[str, Any]:
    """When it loaded and computed, up to the first token."""

    def cut(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin, min(end, until)) for begin, end in spans if begin < until][:_MOST]

    return {"loading": cut(did.loading), "computing": cut(did.computing)}

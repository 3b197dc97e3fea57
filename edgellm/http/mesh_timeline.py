"""The measured work of a mesh's devices for the last reply, beside the plan: for the page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from edgellm.coldstart.plan import Way
from edgellm.llm.mesh.mesh_llm import Opened
from edgellm.llm.mesh.timeline import Did, Measured, Replies, beside
from edgellm.spec.types import Summary

_MOST = 200  # spans of a kind that are drawn for a device


class Course:
    """The last measured reply of one mesh. Replies begin and end in threads of their own; those that shared the devices
    are left out, since it is unknown which work was done for which reply."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._replies = opened, Replies(opened)
        self._lock = threading.Lock()
        self._open = 0
        self._mixed = False
        self._last = None if opened.plan is None else beside(None, opened.plan.way)

    def begins(self) -> None:
        """Note that a reply begins. May wait for the devices' reports on earlier replies."""
        with self._lock:
            self._open += 1
            if self._open > 1:
                self._mixed = True
                return
            self._replies.asked(anew=self._mixed or self._replies.stands)
            self._mixed = False

    def over(self, summary: Summary | None) -> None:
        """Note that a reply is over; `summary` is None where it failed. May wait, as `begins` may."""
        with self._lock:
            self._open -= 1
            found = None if self._mixed or summary is None else self._replies.heard(summary)
            if found is None:
                self._mixed = True  # the work so far belongs to no reply
            else:
                self._last = _drawn(*found)

    def told(self) -> dict[str, Any]:
        """Return which device holds which layers, counted from 1, and the last measured reply; at first, the plan."""
        shares = self._opened.verifier.mesh.shares
        holders = [
            {"device": one.name, "first_layer": one.layers.start + 1, "last_layer": one.layers.stop} for one in shares
        ]
        return {"holders": holders, "last": self._last}


def _drawn(found: Measured, plan: Way | None) -> dict[str, Any]:
    told = beside(found.way, plan, found.disproved)
    for stage, did in zip(told["stages"], found.did, strict=True):
        stage["measured"] |= _spans(did, found.way.ttft_s)
    return told


def _spans(did: Did, until: float) -> dict[str, Any]:
    """Return when a device loaded and computed, up to the first token."""

    def cut(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin, min(end, until)) for begin, end in spans if begin < until][:_MOST]

    return {"loading": cut(did.loading), "computing": cut(did.computing)}

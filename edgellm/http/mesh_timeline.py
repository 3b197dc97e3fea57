"""What the devices of a mesh did for the last reply, beside what was planned: for the page."""

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
    """Of one mesh. Replies begin and end in threads of their own; of those that shared the devices with another one
    nothing is told, since nobody can tell what was done for which."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._replies = opened, Replies(opened)
        self._lock = threading.Lock()
        self._open = 0
        self._mixed = False
        self._last = None if opened.plan is None else beside(None, opened.plan.way)

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
    """When it loaded and computed, up to the first token."""

    def cut(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin, min(end, until)) for begin, end in spans if begin < until][:_MOST]

    return {"loading": cut(did.loading), "computing": cut(did.computing)}

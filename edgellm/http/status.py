"""The work of a mesh, which the page shows beside the conversation."""

import threading
from typing import Any

from edgellm.coldstart.plan import PlanOption
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.llm.mesh_timeline import Measured, Replies, comparison
from edgellm.spec.stats import Summary


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

"""The status that the page shows beside the conversation: the pair's models, devices and links, and a mesh."""

import threading
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgellm.coldstart.plan import PlanOption
from edgellm.errors import InvalidOption
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.llm.mesh_timeline import Measured, Replies, comparison
from edgellm.spec.stats import Summary


class StageOut(BaseModel):
    """A device of a plan, with its layers, counted from 1, both ends included."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    device: str = Field(max_length=200)
    first_layer: int
    last_layer: int
    load_s: float
    wait_s: float
    network_s: float
    compute_s: float
    finish_s: float


class PlanOut(BaseModel):
    """The part of a plan that the page draws."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    ttft_s: float
    advice: str = Field(max_length=2000)
    stages: list[StageOut] = Field(min_length=1, max_length=256)


def read_plan(path: Path) -> PlanOut:
    """Read a plan as `edgellm mesh plan --json` prints it. Raises InvalidOption for anything else."""
    try:
        return PlanOut.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{path} holds no plan ({first['loc'] or first['msg']})."
        raise InvalidOption(what, f"Make one: edgellm mesh plan ... --json > {path.name}") from None


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

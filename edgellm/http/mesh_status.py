"""A mesh on the page: its plan from a file, and the measured work of its devices for the last reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgellm.coldstart.plan import PlanOption
from edgellm.errors import InvalidOption
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.llm.mesh_timeline import DeviceTimeline, Measured, Replies, beside
from edgellm.spec.types import Summary

_MOST_BYTES = 2**20


class StageOut(BaseModel):
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
    """Read a plan as `edgellm mesh plan --json` prints it.

    Raises:
        InvalidOption: the file cannot be read, or is something else.
    """
    try:
        with path.open("rb") as file:
            return PlanOut.model_validate(json.loads(file.read(_MOST_BYTES)))
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    except (ValueError, RecursionError) as error:
        what = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
        raise InvalidOption(
            f"{path} holds no plan ({what}).", f"Make one: edgellm mesh plan ... --json > {path.name}"
        ) from None


_MOST = 200  # spans of a kind that are drawn for a device


class MeshRecorder:
    """The last measured reply of one mesh. Replies begin and end in threads of their own; those that shared the devices
    are left out, since it is unknown which work was done for which reply."""

    def __init__(self, opened: OpenedMesh) -> None:
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


def _drawn(found: Measured, plan: PlanOption | None) -> dict[str, Any]:
    told = beside(found.way, plan, found.disproved)
    for stage, did in zip(told["stages"], found.did, strict=True):
        stage["measured"] |= _spans(did, found.way.ttft_s)
    return told


def _spans(did: DeviceTimeline, until: float) -> dict[str, Any]:
    """Return when a device loaded and computed, up to the first token."""

    def cut(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin, min(end, until)) for begin, end in spans if begin < until][:_MOST]

    return {"loading": cut(did.loading), "computing": cut(did.computing)}

"""A model over the measured home: what each device has of it is asked, and the best split of that is found."""

from __future__ import annotations

import time
from pathlib import Path

from edgellm.api.mesh import LocalMember, like, place_of, positions_of, room_of
from edgellm.coldstart.plan import Objective
from edgellm.engine import check_gguf
from edgellm.errors import EdgeError
from edgellm.mesh.cover import Able
from edgellm.mesh.holding import WholeModel
from edgellm.mesh.layers import model_of
from edgellm.mesh.placing import Placed, place
from edgellm.mesh.split import HERE
from edgellm.mesh.survey import Survey
from edgellm.serve.seat import RemoteMember

PLAN_SECONDS = 5.0  # for the planner; then the best plan so far is taken


def place_at_home(
    path: Path, home: Survey, *, tokens_in: int, tokens_out: int, objective: Objective = "ttft",
    context: int | None = None, sessions: int = 1,
) -> Placed:  # fmt: skip
    """Who of the surveyed devices takes which layers of the model at `path` now, for a prompt of `tokens_in` tokens and
    a reply of `tokens_out`, with `sessions` caches of `context` tokens on each.

    Raises:
        ModelUnsupported, ModelCorrupt: a model that cannot be cut, by name.
        PlanImpossible: the devices do not hold it; says what to bring where, if that helps.
    """
    whole, fleet = WholeModel(path), home.fleet()
    model, header = model_of(path), check_gguf(path)
    room = room_of(header, positions_of(header, context), sessions)
    layer_bytes = max(model.layer_bytes) + room.layer
    able: list[Able] = []
    left_out = [(name, error.what) for name, error in home.left_out]
    for device in fleet.devices:
        known = like(device.name, fleet, model, layer_bytes)
        try:
            if device.name == HERE:
                able.append(LocalMember(whole, None, known, layer_bytes).able(whole.model))
            else:
                there = place_of(home.workers[device.name])
                member = RemoteMember(there, like=known, layer_bytes=layer_bytes, stage_bytes=room.stage)
                able.append(member.able(whole.model))
        except EdgeError as error:
            left_out.append((device.name, error.what))
    began = time.monotonic()
    return place(
        model, fleet, home.workers, able, tokens_in=tokens_in, tokens_out=tokens_out, objective=objective,
        left_out=left_out, room=room, stop=lambda: time.monotonic() - began > PLAN_SECONDS,
    )  # fmt: skip

"""A model over the measured home: ask each device what it has of the model, and find the best split."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import Objective
from edgellm.engine import check_gguf
from edgellm.errors import EdgeError
from edgellm.llm.mesh.mesh_llm import LocalMember, like, place_of, positions_of, recipe_digest, room_of
from edgellm.mesh.model_costs import model_of
from edgellm.mesh.placement.failover_planner import Able
from edgellm.mesh.placement.placement import Placed, Room, missing, place
from edgellm.mesh.placement.split import HERE, Share
from edgellm.mesh.profiling.fleet_profiler import Survey
from edgellm.mesh.runtime.layer_sources import WholeModel
from edgellm.services.client.stage_client import RemoteMember

PLAN_SECONDS = 5.0  # for the planner; then the best plan so far is taken


def place_at_home(
    path: Path, home: Survey, *, tokens_in: int, tokens_out: int, objective: Objective = "ttft",
    context: int | None = None, sessions: int = 1,
) -> Placed:  # fmt: skip
    """Return which surveyed devices take which layers of the model at `path` now, for a prompt of `tokens_in` tokens
    and a reply of `tokens_out`, with `sessions` caches of `context` tokens on each.

    Raises:
        ModelUnsupported, ModelCorrupt: a model that cannot be cut, by name.
        PlanImpossible: the devices do not hold it; says what to bring where, if that helps.
    """
    whole, fleet = WholeModel(path), home.fleet()
    model, header = model_of(path), check_gguf(path)
    room = room_of(header, positions_of(header, context), sessions)
    able: list[Able] = []
    left_out = [(name, error.what) for name, error in home.left_out]
    for name, found in _asked([device.name for device in fleet.devices], whole, home, model, room):
        if isinstance(found, Able):
            able.append(found)
        else:
            left_out.append((name, found.what))
    began = time.monotonic()
    return place(
        model, fleet, home.workers, able, tokens_in=tokens_in, tokens_out=tokens_out, objective=objective,
        left_out=left_out, room=room, stop=lambda: time.monotonic() - began > PLAN_SECONDS,
    )  # fmt: skip


def to_bring(path: Path, shares: Sequence[Share], home: Survey) -> list[tuple[str, int]]:
    """Return the bytes that each device of a split over the surveyed ones still lacks of its layers, by name. This
    device has the model; one that no longer answers is taken to lack all of its layers."""
    names = [share.name for share in shares]
    if names == [HERE]:
        return [(HERE, 0)]
    model = model_of(path)
    asked = _asked(names, WholeModel(path), home, model, Room())
    able = [found if isinstance(found, Able) else Able(name, frozenset()) for name, found in asked]
    lacking = {one.share.name: one.size for one in missing(model, shares, able)}
    return [(name, lacking.get(name, 0)) for name in names]


def _asked(
    names: Sequence[str], whole: WholeModel, home: Survey, model: ModelCosts, room: Room
) -> list[tuple[str, Able | EdgeError]]:
    """Return what each of these devices has of the model, or why it cannot be used; all are asked at once."""
    fleet, layer_bytes = home.fleet(), max(model.layer_bytes) + room.layer
    there = {name: home.workers[name] for name in names if name != HERE}
    recipe = recipe_digest(whole, [place_of(worker) for worker in there.values() if worker.address is not None])

    def ask(name: str) -> tuple[str, Able | EdgeError]:
        known = like(name, fleet, model, layer_bytes)
        try:
            if name == HERE:
                return name, LocalMember(whole, None, known, layer_bytes).able(whole.model)
            member = RemoteMember(
                place_of(there[name]), like=known, layer_bytes=layer_bytes, stage_bytes=room.stage, recipe=recipe
            )
            return name, member.able(whole.model)
        except EdgeError as error:
            return name, error

    with ThreadPoolExecutor(len(names)) as at_once:
        return list(at_once.map(ask, names))

"""The status that the page shows beside the conversation: the pair's models, devices and links, and a mesh."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from edgellm.errors import TrustUnusable
from edgellm.http.handlers import RequestHandler
from edgellm.http.mesh_status import MeshStatus, PlanOut
from edgellm.http.middleware import HIDDEN, redact_all
from edgellm.http.model_pool import LoadedModel
from edgellm.http.schemas.responses import Health
from edgellm.llm import LLM
from edgellm.rpc.trust.peer_store import Peers


class LinkStatus(BaseModel):
    """The verifier on another device."""

    address: str
    up: bool
    reason: str
    rtt_ms: float | None


class SamplingStatus(BaseModel):
    """The sampling of requests that ask for none, and who wants it so."""

    model_config = ConfigDict(from_attributes=True)

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    origin: str


class RequestCounts(BaseModel):
    running: int
    waiting: int
    places: int


class PairedDevice(BaseModel):
    name: str
    short: str
    addresses: list[str]
    may_here: list[str]
    may_there: list[str]


class ModelInMemory(BaseModel):
    """A model in memory. `memory` are bytes by device, as estimated; `expires_s` is null where it stays, `link` where
    it verifies here."""

    name: str
    draft: str | None
    verifier: str | None
    context_length: int
    sampling: SamplingStatus
    link: LinkStatus | None
    memory: dict[str, int]
    users: int
    idle_s: float
    expires_s: float | None


class ServerStatus(BaseModel):
    """The state of the server. Fields about the pair are null where it serves none, or it is not in memory."""

    model: str | None = None
    draft: str | None = None
    verifier: str | None = None
    context_length: int | None = None
    sampling: SamplingStatus | None = None
    link: LinkStatus | None = None
    requests: RequestCounts
    devices: list[PairedDevice]
    anonymous: bool
    models: list[ModelInMemory]
    loading: list[str]
    mesh: MeshStatus | None = None
    plan: PlanOut | None


def server_health(handler: RequestHandler) -> Health:
    """Return that requests are accepted, and the models; none are named where clients need a key.

    Raises:
        ApiError: the model is being loaded.
    """
    _ = handler.models.default_name
    if not handler.anonymous:
        return Health(models=None)
    return Health(models={name: "ok" if up else "away" for name, up in handler.models.answers()} or None)


def server_status(handler: RequestHandler) -> ServerStatus:
    """Return the state of the server and its pair. Without an API key other devices are not named.

    Raises:
        ApiError: the model is being loaded.
    """
    models, admission = handler.models, handler.admission
    served = models.default
    places = admission.max_running
    if served is not None and served.replies is not None:
        places = min(places, served.replies)
    own = {} if served is None else _pair_status(handler, served.pair)
    status = ServerStatus(
        **own,
        model=models.default_name,
        mesh=None if served is None or served.recorder is None else served.recorder.status(),
        requests=RequestCounts(running=admission.running, waiting=admission.waiting, places=places),
        devices=[] if handler.anonymous else _paired_devices(),
        anonymous=handler.anonymous,
        models=[_in_memory(handler, model) for model in models.pool.by_use()],
        loading=list(models.pool.loading),
        plan=handler.plan,
    )
    return redact_all(status) if handler.anonymous else status


def _pair_status(handler: RequestHandler, pair: LLM) -> dict[str, Any]:
    """Return the fields of the server's own pair and of each pair in memory."""
    return {
        "draft": pair.draft_name, "verifier": pair.verifier_name, "context_length": pair.context_length,
        "sampling": SamplingStatus.model_validate(pair.sampling), "link": _link(handler, pair),
    }  # fmt: skip


def _in_memory(handler: RequestHandler, model: LoadedModel) -> ModelInMemory:
    pair = model.served.pair
    return ModelInMemory(
        **_pair_status(handler, pair), name=model.name, memory=dict(pair.memory.by_device), users=model.users,
        idle_s=model.idle_s, expires_s=model.expires_s,
    )  # fmt: skip


def _link(handler: RequestHandler, pair: LLM) -> LinkStatus | None:
    """Return the state of a pair's link to its verifier, None where that is here; for anonymous clients without the
    address."""
    if pair.verifier_up is None:
        return None
    address, reason = (HIDDEN, "") if handler.anonymous else (pair.verifier_at, pair.verifier_reason)
    return LinkStatus(address=address, up=pair.verifier_up(), reason=reason, rtt_ms=handler.rtt_ms)


def _paired_devices() -> list[PairedDevice]:
    try:
        peers = Peers().all()
    except TrustUnusable:
        return []
    return [
        PairedDevice(
            name=peer.name, short=peer.id.short, addresses=[str(address) for address in peer.addresses],
            may_here=sorted(peer.rights), may_there=sorted(peer.granted),
        )
        for peer in peers
    ]  # fmt: skip

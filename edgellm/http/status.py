"""The status that the page shows beside the conversation: the pair's models, devices and links, and a mesh."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from edgellm.errors import TrustUnusable
from edgellm.http.handlers import RequestHandler, ServedModel
from edgellm.http.mesh_status import MeshStatus, PlanOut
from edgellm.http.middleware import HIDDEN, redact_all
from edgellm.rpc.trust.peer_store import Peers


class LinkStatus(BaseModel):
    """The verifier on another device."""

    address: str
    up: bool
    reason: str
    rtt_ms: float | None


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


class ServerStatus(BaseModel):
    """The state of the server. Fields about models are null where it serves no pair."""

    model: str | None = None
    draft: str | None = None
    verifier: str | None = None
    context_length: int | None = None
    link: LinkStatus | None = None
    requests: RequestCounts
    devices: list[PairedDevice]
    anonymous: bool
    mesh: MeshStatus | None = None
    plan: PlanOut | None


def server_status(handler: RequestHandler) -> ServerStatus:
    """Return the state of the server and its pair. Without an API key other devices are not named.

    Raises:
        ApiError: the model is being loaded.
    """
    served, admission = handler.check_ready(), handler.admission
    status = ServerStatus(
        **({} if served is None else _pair_status(handler, served)),
        requests=RequestCounts(running=admission.running, waiting=admission.waiting, places=admission.max_running),
        devices=[] if handler.anonymous else _paired_devices(),
        anonymous=handler.anonymous,
        plan=handler.plan,
    )
    return redact_all(status) if handler.anonymous else status


def _pair_status(handler: RequestHandler, served: ServedModel) -> dict[str, Any]:
    pair, link = served.pair, None
    if pair.verifier_up is not None:
        address, reason = (HIDDEN, "") if handler.anonymous else (pair.verifier_at, pair.verifier_reason)
        link = LinkStatus(address=address, up=pair.verifier_up(), reason=reason, rtt_ms=handler.rtt_ms)
    return {
        "model": served.name, "draft": pair.draft_name, "verifier": pair.verifier_name, "link": link,
        "context_length": pair.context_length, "mesh": served.recorder and served.recorder.status(),
    }  # fmt: skip


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

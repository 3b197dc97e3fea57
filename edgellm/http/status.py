"""The status that the page shows beside the conversation: the models of the pair, devices and links, and a mesh."""

from __future__ import annotations

from typing import Any

from edgellm.errors import TrustUnusable
from edgellm.http.handlers import RequestHandler
from edgellm.http.middleware import SOMEWHERE, redact_all
from edgellm.rpc.trust.peer_store import Peers


def describe(reception: RequestHandler) -> dict[str, Any]:
    """Return the state of the server and of its pair. Where no key is asked for, other devices are not named.

    Raises:
        ApiError: the model is being loaded.
    """
    writer, admission = reception.ready(), reception.admission
    told: dict[str, Any] = dict.fromkeys(("model", "draft", "verifier", "context_length", "link"))
    if writer is not None:
        pair = writer.pair
        told["model"], told["draft"], told["verifier"] = writer.name, pair.draft_name, pair.verifier_name
        told["context_length"] = pair.context_length
        if pair.verifier_up is not None:
            told["link"] = {
                "address": pair.verifier_at, "up": pair.verifier_up(), "reason": pair.verifier_reason,
                "rtt_ms": reception.rtt_ms,
            }  # fmt: skip
    course = None if writer is None else writer.course
    told |= {
        "requests": {"running": admission.running, "waiting": admission.waiting, "places": admission.most},
        "devices": [] if reception.anonymous else _devices(),
        "anonymous": reception.anonymous,
        "mesh": None if course is None else course.told(),
        "plan": None if reception.plan is None else reception.plan.model_dump(),
    }
    if not reception.anonymous:
        return told
    if told["link"] is not None:
        told["link"] |= {"address": SOMEWHERE, "reason": ""}
    return dict(redact_all(told))


def _devices() -> list[dict[str, Any]]:
    try:
        peers = Peers().all()
    except TrustUnusable:
        return []
    return [
        {
            "name": peer.name, "short": peer.id.short, "addresses": [str(address) for address in peer.addresses],
            "may_here": sorted(peer.rights), "may_there": sorted(peer.granted),
        }
        for peer in peers
    ]  # fmt: skip

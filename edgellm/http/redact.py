"""Redaction of what clients without a key are not told: names, IDs and addresses of other devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, TypeAlias

from edgellm.errors import TrustUnusable
from edgellm.http.schemas.errors import Fault
from edgellm.rpc.trust.peer_store import Peer, Peers

Redact: TypeAlias = Callable[[str], str]

SOMEWHERE = "(hidden)"
_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]+(?:%\w+)?\](?::\d+)?|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)")


def keep(text: str) -> str:
    """Return `text` as it is, for clients that have shown the key."""
    return text


def redact(text: str, peers: Iterable[Peer] | None = None) -> str:
    """Return `text` with "device N" for paired devices, and `SOMEWHERE` for addresses beyond this machine."""
    for number, peer in enumerate(_peers() if peers is None else peers, 1):
        known = {peer.name, str(peer.id), peer.id.short, *map(str, peer.addresses)}
        hosts = {address.host for address in peer.addresses if not address.loopback}
        words = "|".join(re.escape(word) for word in sorted(known | hosts, key=len, reverse=True))
        text = re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", f"device {number}", text, flags=re.IGNORECASE)
    return _ADDRESS.sub(_hidden, text)


def redact_all(found: Any) -> Any:
    """Return JSON data with every string redacted, keys of objects excepted."""
    if isinstance(found, str):
        return redact(found)
    if isinstance(found, dict):
        return {key: redact_all(value) for key, value in found.items()}
    return [redact_all(value) for value in found] if isinstance(found, (list, tuple)) else found


def redact_fault(fault: Fault) -> Fault:
    """Return `fault` with its message redacted."""
    return replace(fault, message=redact(fault.message))


def _peers() -> list[Peer]:
    try:
        return Peers().all()
    except TrustUnusable:
        return []


def _hidden(found: re.Match[str]) -> str:
    host = found[0][1:].partition("]")[0] if found[0].startswith("[") else found[0].partition(":")[0]
    try:
        return found[0] if ip_address(host.partition("%")[0]).is_loopback else SOMEWHERE
    except ValueError:
        return found[0]

"""Versions of the contract, and which side of two is the older one."""

from __future__ import annotations

from importlib import import_module

from edgellm.errors import PeerTooNew, PeerTooOld

LINK = 1  # of trust.proto; what devices do together has its own
PAIRING = 2  # of its service Pairing; 2: both sides sign the transcript


def program() -> str:
    """Return the version of edgellm, for display. Imported late: the package itself imports this module."""
    return str(vars(import_module("edgellm"))["__version__"])


def check_version(theirs: int, ours: int, who: str) -> None:
    """Refuse a peer, named `who`, that speaks another version.

    Raises:
        PeerTooOld, PeerTooNew: says on which side to update.
    """
    if theirs == ours:
        return
    old = theirs < ours
    raise (PeerTooOld if old else PeerTooNew)(
        f"{who[0].upper()}{who[1:]} speaks protocol version {theirs}, and this side version {ours}.",
        f"Update edgellm on {who if old else 'this device'}.",
    )

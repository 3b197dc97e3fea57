"""Versions of the contract, which side of two is the older one, and messages that are not of it."""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from edgellm.errors import PeerTooNew, PeerTooOld, ProtocolError

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


M = TypeVar("M", bound=Message)

SMALL = 2**16  # bytes of a greeting: a parsed message may take more than sixteen times the memory of its bytes
VOCABULARY = 2**20  # bytes of hashes, or of a block of tokens


def parsed(kind: type[M], data: bytes, most: int | None = None) -> M:
    """Parse `data` as a message of this `kind`, of at most `most` bytes.

    gRPC could parse it itself, but before the guard has checked the caller, and with an error that explains nothing.

    Raises:
        ProtocolError: the data is not such a message, or is too long.
    """
    if most is not None and len(data) > most:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} has {len(data)} bytes; {most} are allowed.", _UPDATE)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} is not what the contract describes.", _UPDATE) from None


_UPDATE = "Run the same version of edgellm on both sides."

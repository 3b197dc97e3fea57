"""Parsing of protobuf messages: the one place where bytes from another device are parsed."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from edgellm.errors import ProtocolError

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

"""From bytes to messages: the one place where what another device has sent is parsed."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from edgellm.errors import ProtocolError

M = TypeVar("M", bound=Message)

SMALL = 2**16  # bytes of a greeting: a parsed message may take sixteen times the room of its bytes, and more
VOCABULARY = 2**20  # of hashes, or of a block of tokens


def parsed(kind: type[M], data: bytes, most: int | None = None) -> M:
    """`data` as a message of this `kind`, of at most so many bytes.

    gRPC would parse for us; but then before the guard has looked who asks, and with an answer that explains nothing.

    Raises:
        ProtocolError: it is none, or is too long.
    """
    if most is not None and len(data) > most:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} has {len(data)} bytes; {most} are allowed.", _UPDATE)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} is not what the contract describes.", _UPDATE) from None


_UPDATE = "Run the same version of edgellm on both sides."

"""The contract: messages and services in protobuf, the generated code, versions, and the parsing of messages."""

from importlib import import_module
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from edgellm.errors import SAME_VERSION, PeerTooNew, PeerTooOld, ProtocolError

PROTOCOL = 11
"""The version of all services: another one is refused in the answer to a greeting, or with FAILED_PRECONDITION."""


def program_version() -> str:
    """Return the version of edgellm, for display. Imported late: the package itself imports this module."""
    return str(vars(import_module("edgellm"))["__version__"])


def check_version(theirs: int, name: str) -> None:
    """Raise PeerTooOld or PeerTooNew, which says what to update, where a peer, `name`, speaks another version."""
    if theirs == PROTOCOL:
        return
    old = theirs < PROTOCOL
    raise (PeerTooOld if old else PeerTooNew)(
        f"{name[0].upper()}{name[1:]} speaks protocol version {theirs}, but this device speaks version {PROTOCOL}.",
        f"Update edgellm on {name if old else 'this device'}.",
    )


M = TypeVar("M", bound=Message)

MAX_GREETING = 2**16  # bytes of a greeting: a parsed message may take more than sixteen times the memory of its bytes


def parse_message(kind: type[M], data: bytes, max_bytes: int | None = None) -> M:
    """Return `data` parsed as a message of this `kind`, of at most `max_bytes` bytes. Raise ProtocolError. gRPC would
    parse it before the caller is checked, and with an error that explains nothing."""
    if max_bytes is not None and len(data) > max_bytes:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} has {len(data)} bytes; {max_bytes} are allowed.", SAME_VERSION)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError(f"A {kind.DESCRIPTOR.name} cannot be parsed.", SAME_VERSION) from None

"""Messages between this process and the one that holds a model over RPC servers: JSON, with arrays behind it."""

from __future__ import annotations

import json
import struct
from typing import Any

from edgellm import errors
from edgellm.errors import EdgeError, EngineFailed

_HEAD = struct.Struct("<I")
_ALIGNED = 4  # bytes of an array's element


def pack(fields: dict[str, Any], *arrays: bytes) -> bytes:
    """Return a message of `fields` and the bytes of arrays."""
    head = json.dumps(fields).encode()
    head += b" " * (-len(head) % _ALIGNED)
    return b"".join((_HEAD.pack(len(head)), head, *arrays))


def unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the fields of a message, and the bytes behind them."""
    (size,) = _HEAD.unpack_from(message)
    start = _HEAD.size + size
    return json.loads(message[_HEAD.size : start]), memoryview(message)[start:]


def pack_error(error: EdgeError) -> bytes:
    """Return the message that an order failed with `error`."""
    return pack({"error": type(error).__name__, "what": error.what, "next_step": error.next_step})


def raise_error(fields: dict[str, Any]) -> None:
    """Raise the error that a message is about; do nothing if it is about none."""
    if (name := fields.get("error")) is None:
        return
    kind = getattr(errors, str(name), EngineFailed)
    raise kind(str(fields.get("what")), str(fields.get("next_step")))

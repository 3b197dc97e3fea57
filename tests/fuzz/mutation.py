"""Mutation: random changes of bytes, and of values in messages."""

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_WHOLE = (0, 1, 2, 127, 128, 255, 256, 257, 300, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 2**20, 2**31 - 1, 2**31,
          2**32 - 1)  # fmt: skip
_REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 1e-320, 1e300, math.nan, math.inf, -math.inf)
_PIECES = (
    b"", b"\0", b"\xff", b"\xff" * 10, b"\x80" * 11, b"\xff\xff\xff\xff\x0f", b"\0" * 64, b"%n%s", b"../../x",
    "\u202e\x1b[2J".encode(), b"\xed\xa0\x80", struct.pack("<d", math.nan), struct.pack("<Q", 2**63),
)  # fmt: skip


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to four changes; some of them splice in one of the `others`."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(made):
                made[at] = rng.randrange(256)
            case 2:
                del made[at : at + rng.choice((1, 1, 2, 4, 16))]
            case 3:
                made[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 16)))
            case 4:
                made[at:at] = rng.choice(_PIECES)
            case 5:
                made[at : at + 4] = rng.choice(_PIECES)
            case 6:
                made[at:at] = made[max(0, at - rng.choice((1, 4, 32))) : at] * rng.choice((1, 1, 2, 50))
            case _:
                other = rng.choice(others) if others else b""
                made[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(made)


def tweaked(message: Message, rng: random.Random) -> bytes:
    """Return the bytes of `message` with one or two fields, at any depth, set to another value."""
    made = type(message).FromString(message.SerializeToString())
    for _ in range(rng.choice((1, 1, 2))):
        _tweak(made, rng)
    return made.SerializeToString()


def _tweak(message: Any, rng: random.Random) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    name = field.name
    if field.is_repeated:
        _tweak_list(getattr(message, name), field, rng)
    elif field.message_type is not None:
        if message.HasField(name) and rng.random() < 0.9:
            _tweak(getattr(message, name), rng)
        elif message.HasField(name):
            message.ClearField(name)
        else:
            getattr(message, name).SetInParent()
    else:
        setattr(message, name, _value(field, rng))


def _tweak_list(values: Any, field: FieldDescriptor, rng: random.Random) -> None:
    match rng.randrange(4):
        case 0 if len(values):
            del values[rng.randrange(len(values)) :]
        case 1 if field.message_type is None:
            values.extend(_value(field, rng) for _ in range(rng.choice((1, 1, 2, 300))))
        case 2 if len(values) and field.message_type is None:
            values[rng.randrange(len(values))] = _value(field, rng)
        case _ if field.message_type is not None:
            _tweak(values[0] if len(values) else values.add(), rng)


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_REAL)
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(_PIECES).decode(errors="replace") * rng.choice((1, 1, 40))
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice((*_PIECES, rng.randbytes(32)))
    big = field.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64)
    return rng.choice((*_WHOLE, 2**62, 2**63 - 1)) if big else rng.choice(_WHOLE)

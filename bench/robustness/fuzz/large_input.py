"""Read one large input and print its time and memory as JSON; a program that `bench.robustness.fuzz` starts."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from bench.robustness.fuzz import messages
from edgellm.engine.gguf.reader import check_gguf
from edgellm.rpc.channel import MAX_MESSAGE
from testkit.memory import most_memory

# Tags of a repeated field of numbers, or of bytes, in each message that has one.
_NUMBERS = {
    "session": (b"\x12", b"\x1a"),
    "verdict": (b"\x0a", b"\x1a"),
    "vocabulary": (b"", b"\x1a"),
    "pairing": (b"\x12", b"\x12"),
}
_EMPTY = {"session": b"\x0a\x00", "verdict": b"\x1a\x00", "vocabulary": b"\x12\x00", "pairing": b"\x12\x00"}


def message(name: str, shape: str) -> bytes:
    """Return a message of the largest size."""
    if shape == "zeros":
        return bytes(MAX_MESSAGE)
    if shape == "empty":
        return _EMPTY[name] * (MAX_MESSAGE // 2)
    outer, inner = _NUMBERS[name]
    room = MAX_MESSAGE - 16
    data = inner + _varint(room - 8) + b"\x01" * (room - 8)
    return outer + _varint(len(data)) + data if outer else data


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))


def main() -> None:
    kind, name = sys.argv[1:]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if kind == "message":
            which, shape = name.split()
            readers = {one.name: one.read for one in stack.enter_context(messages.targets(folder))}
            data = message(which, shape)
        before = most_memory()
        began, error = perf_counter(), ""
        try:
            if kind == "header":
                check_gguf(Path(name))
            else:
                readers[which](data)
        except Exception as raised:  # noqa: BLE001 - any error is printed
            text = str(raised).replace(name, "FILE") if kind == "header" else str(raised)
            error = f"{type(raised).__name__}: {text}"[:200]
        taken = most_memory() - before
        print(json.dumps({"bytes": taken, "seconds": perf_counter() - began, "error": error}))


if __name__ == "__main__":
    main()

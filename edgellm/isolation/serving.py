"""The child's side of `edgellm.isolation.child`: `python -m edgellm.isolation.serving MODULE IDLE ARGUMENT...`.

MODULE has a function `functions(report, ARGUMENT...)` that returns, by name, what the parent may call. A function takes
the bytes of a call (a memoryview) and the call's fields, and returns bytes or a value for JSON; `report` tells the
parent the share that is done. A message is its length (`LENGTH`), a head in JSON behind the head's length, and bytes.
"""

import json
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from edgellm.errors import EdgeError

LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<I")
OUT_OF_MEMORY = 77  # exit code
READY = ""
"""The name of every child's function that returns once the child is ready."""

Report = Callable[[float], None]
Functions = Mapping[str, Callable[..., object]]


def pack(head: Mapping[str, object], data: bytes = b"") -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(head).encode()
    text += b" " * (-(LENGTH.size + _HEAD.size + len(text)) % LENGTH.size)  # arrays may follow
    return b"".join((LENGTH.pack(_HEAD.size + len(text) + len(data)), _HEAD.pack(len(text)), text, data))


def unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the head of a message without its length, and the bytes behind the head. Raise ValueError, RecursionError
    or struct.error where it is none."""
    (size,) = _HEAD.unpack_from(message)
    head = json.loads(message[_HEAD.size : _HEAD.size + size])
    if not isinstance(head, dict):
        raise ValueError("its head is no object")
    return head, memoryview(message)[_HEAD.size + size :]


def serve(prepare: Callable[[Report], Functions], idle: float = 0.0) -> None:
    """Answer the calls on standard input until it ends, or none arrives for `idle` seconds, if that is not 0.

    `prepare` is called once, with the pipes in place. An EdgeError is an answer; a MemoryError ends the process with
    OUT_OF_MEMORY, any other exception with exit code 1.
    """
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output is no answer

    def report(share: float) -> None:
        answers.write(pack({"progress": share}))
        answers.flush()

    try:
        known, failure = dict[str, Callable[..., object]](), None
        try:
            known = {READY: lambda _data: None, **prepare(report)}
        except EdgeError as error:
            failure = error
        while True:
            timer = threading.Timer(idle, os._exit, (0,))
            timer.daemon = True
            if idle:
                timer.start()
            length = calls.read(LENGTH.size)
            timer.cancel()
            if len(length) < LENGTH.size:
                return
            answers.write(_answer(known, failure, calls.read(*LENGTH.unpack(length))))
            answers.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # noqa: BLE001  not raised: the pipe would be closed before there is an exit code
        with suppress(BaseException):
            traceback.print_exc()
        os._exit(1)


def _answer(known: Functions, failure: EdgeError | None, message: bytes) -> bytes:
    head, data = unpack(message)
    try:
        if failure is not None:
            raise failure
        found = known[head.pop("call")](data, **head)
    except EdgeError as error:
        return pack({"error": type(error).__name__, "what": error.what, "next_step": error.next_step})
    return pack({}, found) if isinstance(found, bytes) else pack({"value": found})


if __name__ == "__main__":
    module, wait, *arguments = sys.argv[1:]
    serve(lambda report: import_module(module).functions(report, *arguments), float(wait))

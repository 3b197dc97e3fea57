"""The child's side of `edgellm.isolation.child_process`: answer requests, and lower this process's own limits.

A request, and an answer, is its length (`LENGTH`) and its bytes.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable

LENGTH = struct.Struct("<Q")
OUT_OF_MEMORY = 77  # exit code

Answer = Callable[[bytes], bytes]


def serve(prepare: Callable[[], Answer], idle: float | None = None) -> None:
    """Answer the requests on standard input until it ends, or none arrives for `idle` seconds.

    `prepare` is called once, with the pipes in place, and returns the function that answers. A MemoryError ends the
    process with OUT_OF_MEMORY, any other exception with exit code 1.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output is no answer
    try:
        answer = prepare()
        while True:
            timer = _timer(idle)
            header = requests.read(LENGTH.size)
            if timer is not None:
                timer.cancel()
            if len(header) < LENGTH.size:
                return
            reply = answer(requests.read(*LENGTH.unpack(header)))
            answers.write(LENGTH.pack(len(reply)) + reply)
            answers.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # noqa: BLE001  not raised: the pipe would be closed before there is an exit code
        os._exit(1)


def _timer(seconds: float | None) -> threading.Timer | None:
    if seconds is None:
        return None
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
    return timer

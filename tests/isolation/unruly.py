"""A child process that does what a request says: `python -m tests.isolation.unruly [IDLE]`.

A request is one of the words below, or holds one between two `#`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from edgellm.isolation.serving import LENGTH, Answer, serve


def act(what: str, pipe: int) -> bytes:  # noqa: C901
    match what:
        case "sleep":
            time.sleep(3600)
        case "compute":
            while True:
                pass
        case "take memory":
            kept = b"x" * 2**28
            time.sleep(3600)
            return kept
        case "run out of memory":
            raise MemoryError
        case "raise":
            raise ValueError
        case "abort":
            os.abort()
        case "end":
            os._exit(0)
        case "print":
            os.write(1, b"no answer")
        case "announce too much":
            os.write(pipe, LENGTH.pack(2**63))
            time.sleep(3600)
        case "half":
            os.write(pipe, LENGTH.pack(9) + b"half")
            os._exit(0)
        case "much":
            return b"+" + b"x" * 2**24
        case "no utf-8":
            return b"+\xff\xfe"
        case "another mark":
            return b"?text"
        case "a long complaint":
            return b"-" + b"x" * 2**16
        case "variables":
            return " ".join(os.environ).encode()
        case "nothing":
            return b""
        case _:
            return what[::-1].encode()
    return b"done"


def prepare(pipe: int) -> Answer:
    def answer(request: bytes) -> bytes:
        parts = request.decode().split("#")
        return act(parts[len(parts) // 2], pipe)

    return answer


if __name__ == "__main__":
    serve(partial(prepare, os.dup(1)), float(sys.argv[1]) if sys.argv[1:] else None)

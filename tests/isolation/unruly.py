"""Functions of a child that does what it is told: one of the words below, or one between two `#`."""

import inspect
import os
import time

from edgellm.errors import InvalidOption
from edgellm.isolation.serving import LENGTH, Functions, Report, pack


def act(what: str, pipe: int, report: Report) -> object:  # noqa: C901
    match what:
        case "sleep":
            time.sleep(3600)
        case "report":
            for share in range(40):
                report(share / 40)
                time.sleep(0.05)
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
        case "refuse":
            raise InvalidOption("It is 7.", "Give 8.")
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
        case "no head":
            os.write(pipe, LENGTH.pack(9) + b"\x04\0\0\0[[[[[")
        case "an unknown error":
            os.write(pipe, pack({"error": "EDGE_ERROR" * 10**3, "what": "x" * 10**4, "next_step": 7}))
            time.sleep(3600)
        case "much":
            return b"x" * 2**24
        case "a value":
            return [1, "two"]
        case "variables":
            return " ".join(os.environ).encode()
        case "nothing":
            return b""
        case _:
            return what[::-1].encode()
    return b"done"


def functions(report: Report) -> Functions:
    pipe = inspect.getclosurevars(report).nonlocals["answers"].fileno()

    def told(data: memoryview) -> object:
        parts = bytes(data).decode().split("#")
        return act(parts[len(parts) // 2], pipe, report)

    return dict.fromkeys(("act", "render", "arguments"), told)

"""A request to stop that llama.cpp obeys even in the middle of a decode."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from edgellm.engine.native import lib

ShouldStop: TypeAlias = Callable[[], bool]
"""Whether the caller has given up; polled between steps."""

_HEARD = b"\1"


def never() -> bool:
    """Return False: the default for computations that can be stopped."""
    return False


class Stop:
    """A flag that any thread may set, once; calling it returns whether it is set.

    llama.cpp asks between any two steps of a computation, hundreds of times per pass. A Python function would need
    Python's lock each time, and wait for other threads. So llama.cpp calls the C library's `strlen` instead, on a text
    that is empty until the flag is set.
    """

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = ctypes.create_string_buffer(2)

    def set(self) -> None:
        self._flag[0] = _HEARD

    def __call__(self) -> bool:
        return bool(self._flag[0] == _HEARD)

    @property
    def address(self) -> int:
        """The address to give `asked`; valid as long as this object lives."""
        return ctypes.addressof(self._flag)


# the 1 that strlen returns is also a true bool: the lowest byte of the same register
asked: Any = ctypes.cast(ctypes.CDLL("msvcrt" if os.name == "nt" else None).strlen, lib.ggml_abort_callback)
nobody: Any = lib.ggml_abort_callback()

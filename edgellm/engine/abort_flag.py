"""A wish to stop, which llama.cpp hears also in the middle of a decode."""

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
    """Return False: the default of what may be stopped."""
    return False


class Stop:
    """Calling it tells whether it is set, which may be done once, from any thread.

    llama.cpp asks between any two steps of a computation, hundreds of times a pass. A function of Python's would need
    its lock each time, and wait for other threads; so the one that is asked is the C library's `strlen`, of a text
    that is empty until then.
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
        """Of what `asked` is to be asked about; valid as long as this object lives."""
        return ctypes.addressof(self._flag)


# the 1 that it returns is a true bool too: the lowest byte of the same register
asked: Any = ctypes.cast(ctypes.CDLL("msvcrt" if os.name == "nt" else None).strlen, lib.ggml_abort_callback)
nobody: Any = lib.ggml_abort_callback()

"""File permissions that hold for the superuser, too."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522  # of capset(2)
_OVERRIDES = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


@contextmanager
def obeyed() -> Iterator[None]:
    """Have this thread obey the modes of files while the `with` lasts, whoever runs it."""
    if os.getuid():
        yield
        return
    if sys.platform != "linux":
        pytest.skip("the superuser may do everything")
    before = _capabilities()
    _set_capabilities((before[0] & ~_OVERRIDES, *before[1:]))
    try:
        yield
    finally:
        _set_capabilities(before)


def _capabilities() -> tuple[int, ...]:
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capget(header, data):
        raise OSError("capget failed")
    return tuple(data)


def _set_capabilities(values: tuple[int, ...]) -> None:
    header, data = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)(*values)
    if ctypes.CDLL(None).capset(header, data):
        raise OSError("capset failed")

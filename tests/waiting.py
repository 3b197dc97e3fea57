"""Waiting for what other threads and processes do, without a claim on how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], bool]) -> None:
    """Return once it holds; fail after two minutes."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)

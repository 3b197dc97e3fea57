"""Waiting until something holds: a busy machine may take its time."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)

"""Waiting for a result that others compute, for as long as it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from edgellm.errors import Stopped

T = TypeVar("T")
_GLANCE = 0.05  # seconds between two checks whether the result is still wanted


def settled(future: Future[T], stopped: Callable[[], bool] | None) -> T:
    """Return the result, or raise what it raises. Raises Stopped if `stopped` says so before the result is there."""
    while not wait((future,), _GLANCE).done:
        if stopped is not None and stopped():
            raise Stopped
    return future.result()

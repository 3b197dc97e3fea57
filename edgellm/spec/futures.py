"""Waiting for what others compute, as long as somebody wants it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from edgellm.errors import Stopped

T = TypeVar("T")
_GLANCE = 0.05  # seconds between two looks whether anybody still does


def settled(future: Future[T], stopped: Callable[[], bool] | None) -> T:
    """The result, or what it raises. Raises Stopped where `stopped` says so before it is there."""
    while not wait((future,), _GLANCE).done:
        if stopped is not None and stopped():
            raise Stopped
    return future.result()

"""The event loop for all network code of this process.

There is only one, and it lives as long as the process: gRPC's asyncio API has one poller for all loops, and where loops
come and go, it calls into loops that have ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_first = threading.Lock()


def network_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs in a thread of its own. Code that runs in it must never block."""
    with _first:
        return _started()


def run_there(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the network loop, from another thread."""
    return asyncio.run_coroutine_threadsafe(work, network_loop())


@cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="edgellm-link", daemon=True).start()
    return loop

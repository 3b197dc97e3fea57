"""The event loop of this process's network.

There is one, and it lives as long as the process: gRPC's asyncio side has one poller for all loops, and where several
come and go it calls into those that have ended.
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
    """The loop, in a thread of its own. Whoever runs in it must never block."""
    with _first:
        return _started()


def run_there(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine in the network's loop."""
    return asyncio.run_coroutine_threadsafe(work, network_loop())


@cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="edgellm-link", daemon=True).start()
    return loop

"""Admission of requests: a limit of replies at a time, a limit of waiting requests, and no more."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Self

from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo

_INITIAL_SECONDS = 2.0  # assumed time of a reply, until one was measured
_DECAY = 0.8  # weight of earlier replies in the moving average

STOPPING = ErrorInfo(
    503, "The server is stopping. Try again when it has been restarted.", SERVER, code="stopping", retry_after=5.0
)


class Admission:
    """Slots for `max_running` replies at once, and a queue of `max_waiting` requests. Used in one event loop."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._average_seconds = _INITIAL_SECONDS
        self._closed: ErrorInfo | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def limit(self, max_running: int) -> None:
        """Admit no more than `max_running` replies at once from now on; those that are written go on."""
        self.max_running = min(self.max_running, max_running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def wait_seconds(self) -> float:
        """Return how long a new request would have to wait, judging by recent replies."""
        return self._average_seconds * (len(self._queue) + 1) / self.max_running

    async def acquire(self) -> None:
        """Take a slot, in the order of arrival. `release` gives it back.

        Raises:
            ApiError: the queue is full (429), or was closed.
        """
        if self._closed is not None:
            raise ApiError(self._closed)
        if self.running < self.max_running and not self._queue:
            self._take()
            return
        if len(self._queue) >= self.max_waiting:
            raise ApiError(
                ErrorInfo(
                    429, f"The queue is full: {self.running} replies are being written, and {len(self._queue)} requests"
                    " wait. Try again later.", "rate_limit_error", code="queue_full",
                    retry_after=self.wait_seconds(),
                )
            )  # fmt: skip
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(None)  # the slot was given just when it was no longer wanted
            elif slot in self._queue:
                self._queue.remove(slot)
            raise

    def release(self, seconds: float | None) -> None:
        """Give a slot back. `seconds` is how long the reply took, None where none was written."""
        if seconds is not None:
            self._average_seconds = _DECAY * self._average_seconds + (1.0 - _DECAY) * seconds
        self.running -= 1
        while self._queue and self.running < self.max_running:
            slot = self._queue.popleft()
            if not slot.done():
                self._take()
                slot.set_result(None)
        if not self.running:
            self._empty.set()

    def close(self, info: ErrorInfo) -> None:
        """Refuse waiting and new requests with `info` from now on."""
        self._closed = info
        while self._queue:
            slot = self._queue.popleft()
            if not slot.done():
                slot.set_exception(ApiError(info))

    async def wait_until_empty(self) -> None:
        """Wait until no reply is being written."""
        await self._empty.wait()

    def _take(self) -> None:
        self.running += 1
        self._empty.clear()


class FairLock:
    """A lock that is granted in the order of arrival, so that replies compute one round each in turn."""

    def __init__(self) -> None:
        self._queue: deque[threading.Lock] = deque()  # the holder's, then those of waiting threads
        self._mutex = threading.Lock()

    def __enter__(self) -> Self:
        own = threading.Lock()
        own.acquire()
        with self._mutex:
            self._queue.append(own)
            if self._queue[0] is own:
                return self
        own.acquire()  # until the holder before releases it
        return self

    def __exit__(self, *_raised: object) -> None:
        with self._mutex:
            self._queue.popleft()
            if self._queue:
                self._queue[0].release()

"""Admission of requests: a limit of replies at a time, in all and by each model, and a limit of waiting requests."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Self

from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo

_INITIAL_SECONDS = 2.0  # assumed time of a reply, until one was measured
_DECAY = 0.8  # weight of earlier replies in the moving average

STOPPING = ErrorInfo(
    503, "The server is stopping. Try again when it has been restarted.", SERVER, code="stopping", retry_after=5.0
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request in the queue, whose `model` writes at most `most` replies at once."""

    slot: asyncio.Future[None]
    model: str
    most: int | None


class Admission:
    """Slots for `max_running` replies at once, and a queue of `max_waiting` requests. Used in one event loop.

    A model may have memory for fewer replies than there are slots. Its requests wait then, and let those for other
    models pass."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.running = 0
        self._by_model: Counter[str] = Counter()
        self._queue: deque[_Waiting] = deque()  # each waits for a slot, or for its own model
        self._average_seconds = _INITIAL_SECONDS
        self._closed: ErrorInfo | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def wait_seconds(self) -> float:
        """Return how long a new request would have to wait, judging by recent replies."""
        return self._average_seconds * (len(self._queue) + 1) / self.max_running

    async def acquire(self, model: str = "", most: int | None = None) -> None:
        """Take a slot, in the order of arrival, for a reply of `model`, which writes at most `most` at once. `release`
        gives it back.

        Raises:
            ApiError: the queue is full (429), or was closed.
        """
        if self._closed is not None:
            raise ApiError(self._closed)
        if self._has_room(model, most):  # whoever waits while there is a slot waits for another model
            self._take(model)
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
        waiting = _Waiting(slot, model, most)
        self._queue.append(waiting)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(None, model)  # the slot was given just when it was no longer wanted
            elif waiting in self._queue:
                self._queue.remove(waiting)
            raise

    def release(self, seconds: float | None, model: str = "") -> None:
        """Give a slot back that was taken for `model`. `seconds` is how long the reply took, None where none was
        written."""
        if seconds is not None:
            self._average_seconds = _DECAY * self._average_seconds + (1.0 - _DECAY) * seconds
        self.running -= 1
        self._by_model[model] -= 1
        for waiting in list(self._queue):
            if self._has_room(waiting.model, waiting.most):
                self._queue.remove(waiting)
                if not waiting.slot.done():
                    self._take(waiting.model)
                    waiting.slot.set_result(None)
        if not self.running:
            self._empty.set()

    def close(self, info: ErrorInfo) -> None:
        """Refuse waiting and new requests with `info` from now on."""
        self._closed = info
        while self._queue:
            slot = self._queue.popleft().slot
            if not slot.done():
                slot.set_exception(ApiError(info))

    async def wait_until_empty(self) -> None:
        """Wait until no reply is being written."""
        await self._empty.wait()

    def _has_room(self, model: str, most: int | None) -> bool:
        return self.running < self.max_running and (most is None or self._by_model[model] < most)

    def _take(self, model: str) -> None:
        self.running += 1
        self._by_model[model] += 1
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

"""Admission of requests: a limit of replies at a time, a limit of requests that wait, and no more."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Self

from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo

_FIRST_GUESS = 2.0  # seconds that a reply takes, before one was written
_FADE = 0.8  # weight of earlier replies in the mean


class Admission:
    """Places for `most` replies at once, and a line of `most_waiting`. Used in one event loop."""

    def __init__(self, most: int, most_waiting: int) -> None:
        self.most, self.most_waiting = most, most_waiting
        self.running = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._seconds = _FIRST_GUESS
        self._closed: ErrorInfo | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def wait_seconds(self) -> float:
        """Return how long a new request would have to wait, going by recent replies."""
        return self._seconds * (len(self._line) + 1) / self.most

    async def enter(self) -> None:
        """Take a place, in turn. It is given back with `leave`.

        Raises:
            ApiError: the line is full (429), or no request is let in any more (503); says when to ask again.
        """
        if self._closed is not None:
            raise ApiError(self._closed)
        if self.running < self.most and not self._line:
            self._take()
            return
        if len(self._line) >= self.most_waiting:
            raise ApiError(
                ErrorInfo(
                    429, f"{self.running} replies are being written, and {len(self._line)} requests wait: that is all"
                    " there is room for. Ask again later.", "rate_limit_error", "queue_full",
                    retry_after=self.wait_seconds(),
                )
            )  # fmt: skip
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(None)  # the place was given just when it was no longer wanted
            elif place in self._line:
                self._line.remove(place)
            raise

    def leave(self, seconds: float | None) -> None:
        """Give a place back, to the next in line; the reply took `seconds`, None where there was none."""
        if seconds is not None:
            self._seconds = _FADE * self._seconds + (1.0 - _FADE) * seconds
        self.running -= 1
        while self._line and self.running < self.most:
            place = self._line.popleft()
            if not place.done():
                self._take()
                place.set_result(None)
        if not self.running:
            self._empty.set()

    def close(self, fault: ErrorInfo) -> None:
        """Refuse every request from now on with `fault`, also those in line."""
        self._closed = fault
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_exception(ApiError(fault))

    async def empty(self) -> None:
        """Wait until no reply is being written."""
        await self._empty.wait()

    def _take(self) -> None:
        self.running += 1
        self._empty.clear()


def closing() -> ErrorInfo:
    """Return the fault for requests while the server stops."""
    return ErrorInfo(503, "The server is stopping.", SERVER, "stopping", retry_after=5.0)


class FairLock:
    """A lock whose holders take turns in the order in which they came: each computes a round, then the next does."""

    def __init__(self) -> None:
        self._line: deque[threading.Lock] = deque()
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        mine = threading.Lock()
        mine.acquire()
        with self._guard:
            self._line.append(mine)
            if self._line[0] is mine:
                return self
        mine.acquire()  # until the holder before releases it
        return self

    def __exit__(self, *_raised: object) -> None:
        with self._guard:
            self._line.popleft()
            if self._line:
                self._line[0].release()

"""Admission of requests: a limit of replies at a time, in all and by each model, and a limit of waiting requests."""

import asyncio

from edgellm.http.schemas.errors import ApiError


def stopping() -> ApiError:
    """Return the error of requests to a server that stops."""
    message = "The server is stopping. Try again when it has been restarted."
    return ApiError(503, message, code="stopping", retry_after=5.0)


class Admission:
    """Slots for `max_running` replies at once, of which a model may have fewer; a queue of `max_waiting` requests."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.running = self.waiting = 0
        self._slots = asyncio.Semaphore(max_running)
        self._of_models: dict[str, tuple[int, asyncio.Semaphore]] = {}  # all slots of each model, and those left
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    async def acquire(self, model: str = "", most: int | None = None) -> None:
        """Take a slot of `model`, which writes at most `most` at once. Raises ApiError: full (429), or closed."""
        most = most or self.max_running
        if self._of_models.get(model, (0, None))[0] != most:  # the number may change while the model is closed
            self._of_models[model] = most, asyncio.Semaphore(most)
        own = self._of_models[model][1]
        if (own.locked() or self._slots.locked()) and self.waiting >= self.max_waiting and not self._closed:
            message = (
                f"The queue is full: {self.running} replies are being written, and {self.waiting} requests wait."
                " Try again later."
            )
            raise ApiError(429, message, code="queue_full", retry_after=5.0)
        self.waiting += 1
        try:
            await own.acquire()
            try:
                await self._slots.acquire()
            except asyncio.CancelledError:
                own.release()
                raise
        finally:
            self.waiting -= 1
        if self._closed:
            own.release()
            self._slots.release()
            raise stopping()
        self.running += 1
        self._empty.clear()

    def release(self, model: str = "") -> None:
        """Give a slot of `model` back."""
        self.running -= 1
        self._of_models[model][1].release()
        self._slots.release()
        if not self.running:
            self._empty.set()

    def close(self) -> None:
        """Refuse waiting and new requests from now on."""
        self._closed = True
        for slots in (self._slots, *(slots for _, slots in self._of_models.values())):
            for _ in range(self.waiting + 1):  # wakes all waiting requests, and leaves a slot for a late one
                slots.release()

    async def wait_until_empty(self) -> None:
        """Wait until no reply is being written."""
        await self._empty.wait()

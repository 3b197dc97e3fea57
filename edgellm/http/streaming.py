"""Streaming of one reply to a client: written in a thread of its own, passed on in the event loop, stopped when the
client has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import TypeAlias

from edgellm.errors import Stopped
from edgellm.http.middleware import Redact, keep
from edgellm.http.schemas.errors import ApiError, fault_of
from edgellm.spec.stats import Stats
from edgellm.spec.stream import Reply, Utf8
from edgellm.spec.types import Notice, Summary, Token


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Whole characters, and the tokens that they come from: several where a character is made of several."""

    text: str
    tokens: tuple[Token, ...]


Event: TypeAlias = TextDelta | Notice | Summary


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The times of tokens, for the metrics: seconds from the request to the first one, and between the later ones."""

    first: float | None
    gaps: tuple[float, ...]


# Makes a reply, unless the function that it is given says that the client no longer wants it.
Begin: TypeAlias = Callable[[Callable[[], bool]], Reply]
# Called with the summary (None: there is none), the times of tokens, and whether the reply failed.
Measured: TypeAlias = Callable[[Summary | None, TokenTimes, bool], None]


class ReplyTask:
    """A reply under way. `work` is for a thread, all else for the event loop."""

    def __init__(
        self,
        begin: Begin,
        turn: AbstractContextManager[object],
        measured: Measured,
        redact: Redact = keep,
    ) -> None:
        """`begin` makes the reply, which tokenises the prompt, beside other replies; the function that it is given
        returns true once the client no longer wants it. All other computing is done within `turn`. `measured` is
        called when the reply is over, in the thread, before the client is told. `redact` is applied to notices and
        errors."""
        self._redact = redact
        self._begin, self._turn, self._measured = begin, turn, measured
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._reply: Reply | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._asked = perf_counter()
        self._times: list[float] = []
        self.summary: Summary | None = None  # of a reply that is over, and did not fail

    def _marks(self) -> TokenTimes:
        times = self._times
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        return TokenTimes(times[0] - self._asked if times else None, gaps)

    def stop(self) -> None:
        """Stop the reply, as the client has left or has enough, and return at once; the thread ends soon, also within a
        long decode."""
        with self._lock:
            self._stopped = True
            reply = self._reply
        if reply is not None:
            reply.cancel()
        self._heard.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Yield pieces of text and notices as they come, the summary last; nothing more once the reply was stopped.

        Raises:
            ApiError: the reply failed, at once or on its way.
        """
        while (event := await self._heard.get()) is not None:
            if isinstance(event, BaseException):
                fault = fault_of(event)
                raise ApiError(replace(fault, message=self._redact(fault.message))) from event
            yield Notice(self._redact(event.text)) if isinstance(event, Notice) else event
            if isinstance(event, Summary):
                return

    def work(self) -> BaseException | None:
        """Write the reply, to its end or until it is stopped. Return the error, if any, which `events` raises."""
        summary: Summary | None = None
        event: Summary | BaseException
        try:
            reply = self._begin(self._unwanted)
            try:
                if not self._too_late(reply):
                    self._write(reply)
            finally:
                with self._turn:
                    reply.close()
                summary = reply.summary
            event = summary
        except Stopped:  # before there was a reply
            event = summary = Stats().summary(0)
        except BaseException as error:  # noqa: BLE001  the client and the caller are told of any error
            event = error
        failed = isinstance(event, BaseException)
        self.summary = None if failed else summary
        self._measured(summary, self._marks(), failed)
        self._tell(event)
        return event if isinstance(event, BaseException) else None

    def _unwanted(self) -> bool:
        return self._stopped

    def _too_late(self, reply: Reply) -> bool:
        """Keep `reply`; return whether it is too late for it, as `stop` was called before there was one."""
        with self._lock:
            self._reply = reply
            return self._stopped

    def _write(self, reply: Reply) -> None:
        reply.listen(on_notice=self._tell)
        text, held = Utf8(), []
        while (token := self._next(reply)) is not None:
            self._times.append(perf_counter())
            held.append(token)
            words = text.feed(token.piece)
            if words or not text.half_done:
                self._tell(TextDelta(words, tuple(held)))
                held = []
        if (rest := text.end()) or held:
            self._tell(TextDelta(rest, tuple(held)))

    def _next(self, reply: Reply) -> Token | None:
        with self._turn:
            return next(reply, None)

    def _tell(self, event: Event | BaseException) -> None:
        self._loop.call_soon_threadsafe(self._heard.put_nowait, event)

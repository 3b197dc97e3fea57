"""Streaming of one reply: a thread writes it, the event loop passes it on, and a client that leaves cancels it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TypeAlias

from edgellm.engine import ToolCall
from edgellm.errors import Stopped
from edgellm.http.middleware import Redact, unredacted
from edgellm.http.schemas.builder import ResponseBuilder, TextDelta
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo, error_info
from edgellm.spec.stats import Stats
from edgellm.spec.stream import Reply, Utf8
from edgellm.spec.types import UNVERIFIED, Notice, PromptProgress, Summary, Token

Event: TypeAlias = TextDelta | ToolCall | Notice | PromptProgress | Summary


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The times of a reply's tokens in seconds: from the request to the first one, and between later ones."""

    first: float | None
    gaps: tuple[float, ...]


NOT_VERIFIED = ErrorInfo(
    503, "The verifier is not available, and the request allows no unverified text. Try again, or leave"
    " require_verified out.", SERVER, code="not_verified", retry_after=2.0,
)  # fmt: skip

StartReply: TypeAlias = Callable[[Callable[[], bool]], Reply]
"""Starts a reply. It is given a function that returns whether the reply is cancelled."""
ReadReply: TypeAlias = Callable[[Iterable[Token], Callable[[], bool]], Iterator[Token | ToolCall]]
"""Yields a reply's tokens and calls of tools; its function returns after the last token whether the reply broke off."""
OnFinished: TypeAlias = Callable[[Summary | None, TokenTimes, bool], None]
"""Called with the summary, if there is one, the times of tokens, and whether the reply failed."""


def without_calls(tokens: Iterable[Token], _cut: Callable[[], bool]) -> Iterator[Token | ToolCall]:
    """Read a reply that calls no tools."""
    return iter(tokens)


@dataclass(frozen=True, slots=True)
class ReplyOrder:
    """The replies to write: one by each of `starts`, called in turn, which tokenize prompts while other replies
    compute. `requested_at` is a time of `perf_counter`. `verified`: a token that the verifier has not checked ends the
    reply with an error instead. `progress`: the reading of a long prompt is an event, too. `read` tells calls from
    tokens. `redact` is applied to notices and errors."""

    starts: Sequence[StartReply]
    requested_at: float
    verified: bool = False
    progress: bool = False
    read: ReadReply = without_calls
    redact: Redact = unredacted


class ReplyTask:
    """A request's replies being written. `run` is for a thread, all else for the event loop."""

    def __init__(
        self, order: ReplyOrder, compute_lock: AbstractContextManager[object], on_finished: OnFinished
    ) -> None:
        """Hold `compute_lock` while computing, except in `order.starts`. `on_finished` is called in the thread after
        each reply, before the client gets its summary."""
        self._order, self._compute_lock, self._on_finished = order, compute_lock, on_finished
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._reply: Reply | None = None
        self._lock = threading.Lock()
        self._cancelled = False
        self._token_times: list[float] = []
        self.summary: Summary | None = None  # from the last reply that ended without an error

    @property
    def replies(self) -> int:
        """Return how many replies are written, one after the other."""
        return len(self._order.starts)

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the prompt; 0 before it is known."""
        return 0 if self._reply is None else self._reply.prompt_tokens

    def cancel(self) -> None:
        """Cancel the reply and return at once. The thread ends soon after, even within a long decode."""
        with self._lock:
            self._cancelled = True
            reply = self._reply
        if reply is not None:
            reply.cancel()
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Yield text and notices as they come, and each reply's summary; nothing more after `cancel`.

        Raises:
            ApiError: the reply failed, before its first token or later.
        """
        left = len(self._order.starts)
        while left and (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                info = error_info(event)
                raise ApiError(replace(info, message=self._order.redact(info.message))) from event
            yield replace(event, text=self._order.redact(event.text)) if isinstance(event, Notice) else event
            left -= isinstance(event, Summary)

    def run(self) -> BaseException | None:
        """Write the replies until they end or are cancelled. Return the error, if any, which `events` raises."""
        for start in self._order.starts:
            error = self._run(start)
            if error is not None or self._cancelled:
                return error
        return None

    def _run(self, start: StartReply) -> BaseException | None:
        summary: Summary | None = None
        event: Summary | BaseException
        try:
            reply = start(self._is_cancelled)
            try:
                if not self._set_reply(reply):
                    self._write(reply)
            finally:
                with self._compute_lock:
                    reply.close()
                summary = reply.summary
            event = summary
        except Stopped:  # there is no reply yet
            event = summary = Stats().summary(0)
        except BaseException as error:  # noqa: BLE001  the client and the caller get to know any error
            event = error
        failed = isinstance(event, BaseException)
        self.summary = None if failed else summary
        self._on_finished(summary, self._times(), failed)
        self._token_times = []
        self._publish(event)
        return event if isinstance(event, BaseException) else None

    def _is_cancelled(self) -> bool:
        return self._cancelled

    def _set_reply(self, reply: Reply) -> bool:
        """Keep `reply` for `cancel`; return whether `cancel` was called before there was a reply."""
        with self._lock:
            self._reply = reply
            return self._cancelled

    def _write(self, reply: Reply) -> None:
        reply.listen(on_notice=self._publish, on_progress=self._publish if self._order.progress else None)
        text, tokens = Utf8(), list[Token]()
        written = iter(partial(self._next, reply), None)
        for token in self._order.read(written, lambda: reply.summary.finish_reason != "stop"):
            if isinstance(token, ToolCall):
                self._publish(token)
                continue
            if self._order.verified and token.source in UNVERIFIED:
                raise ApiError(NOT_VERIFIED)
            self._token_times.append(perf_counter())
            if tokens and tokens[0].channel is not token.channel:
                self._publish(TextDelta(text.end(), tuple(tokens)))
                tokens = []
            tokens.append(token)
            characters = text.feed(token.piece)
            if characters or not text.has_partial:
                self._publish(TextDelta(characters, tuple(tokens)))
                tokens = []
        if (rest := text.end()) or tokens:
            self._publish(TextDelta(rest, tuple(tokens)))

    def _next(self, reply: Reply) -> Token | None:
        with self._compute_lock:
            return next(reply, None)

    def _times(self) -> TokenTimes:
        times = self._token_times
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        return TokenTimes(times[0] - self._order.requested_at if times else None, gaps)

    def _publish(self, event: Event | BaseException) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


async def stream_pieces(
    task: ReplyTask, first: Event | None, events: AsyncIterator[Event], builder: ResponseBuilder
) -> AsyncIterator[bytes]:
    """Yield the pieces that `builder` makes of `first` and the rest of a task's `events`; an error is the last one."""
    try:
        event, left = first, task.replies
        for piece in builder.opening(task.prompt_tokens):
            yield piece
        while event is not None:
            for piece in _pieces(event, builder, last=left == 1):
                yield piece
            if isinstance(event, Summary):
                left -= 1
                for piece in builder.opening(event.prompt_tokens) if left else ():
                    yield piece
            event = await anext(events, None)
    except ApiError as error:
        for piece in builder.failure(error.info):
            yield piece
    finally:
        task.cancel()


def _pieces(event: Event, builder: ResponseBuilder, *, last: bool) -> list[bytes]:
    if isinstance(event, TextDelta):
        return builder.delta(event)
    if isinstance(event, ToolCall):
        return builder.call(event)
    if isinstance(event, PromptProgress):
        return builder.progress(event)
    return builder.notice(event) if isinstance(event, Notice) else builder.closing(event, last=last)

"""A reply as an iterator of tokens, which can be cancelled at any time and ends at stop sequences."""

from __future__ import annotations

import codecs
import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, TypeAlias

from edgellm.engine import Stop
from edgellm.errors import EdgeError, Stopped
from edgellm.spec.loop import Event
from edgellm.spec.stats import Summary
from edgellm.spec.types import UNVERIFIED, Channel, Explanation, Notice, PromptProgress, Token


class Utf8:
    """A decoder of byte pieces, which may end within characters; wrong bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that `piece` completes."""
        return self._decoder.decode(piece)

    @property
    def has_partial(self) -> bool:
        """Return whether the pieces so far end within a character."""
        return bool(self._decoder.getstate()[0])

    def end(self) -> str:
        """Return the replacement of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


def cut_at_stops(
    stops: Sequence[str], events: Generator[Event, None, None], stats: Summary, heads: Sequence[str] = ()
) -> Generator[Event, None, None]:
    """Yield the same events up to the first complete sequence of `stops` in the answer, which is not yielded; or up to
    one of the `heads` of turns in unverified tokens.

    A token whose bytes may begin a stop sequence is held back until the following bytes are known. A sequence may begin
    and end within tokens: the bytes before it are yielded as a shorter token. `stats` records the sequence.
    """
    wanted = [(stop.encode(), stop) for stop in stops]
    unchecked = [*wanted, *((head.encode(), "") for head in heads)]
    held: list[Token] = []
    try:
        for event in events:
            if not isinstance(event, Token) or event.channel is not Channel.ANSWER:
                yield event
                continue
            held.append(event)
            sequences = unchecked if event.source in UNVERIFIED else wanted
            text = b"".join(token.piece for token in held)
            if (found := _first(sequences, text)) is not None:
                start, stop = found
                stats.cut(len(text) - start, stop)
                yield from _truncated(held, start)
                return
            while held and len(text) - len(held[0].piece) >= _held_bytes(sequences, text):
                text = text[len(held[0].piece) :]
                yield held.pop(0)
    except EdgeError:  # A lost verifier must not lose tokens.
        yield from held
        raise
    finally:
        events.close()
    yield from held


def _first(sequences: Sequence[tuple[bytes, str]], text: bytes) -> tuple[int, str] | None:
    """Return the place and the name of the sequence that is complete first; of two that end together the longer."""
    found = [(at + len(data), at, stop) for data, stop in sequences if (at := text.find(data)) >= 0]
    return min(found)[1:] if found else None


def _held_bytes(sequences: Sequence[tuple[bytes, str]], text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the beginning of a sequence."""
    most = min(len(text), max((len(data) for data, _ in sequences), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(data.startswith(text[-n:]) for data, _ in sequences)), 0)


def _truncated(tokens: Sequence[Token], end: int) -> Generator[Token, None, None]:
    """Yield the tokens that hold the first `end` bytes; the last of them is cut."""
    for token in tokens:
        if end <= 0:
            return
        yield token if len(token.piece) <= end else replace(token, piece=token.piece[:end])
        end -= len(token.piece)


# Arguments: the statistics to update, whether to explain, the cancellation flag, and the progress callback.
Writer: TypeAlias = Callable[
    [Summary, bool, Callable[[], bool], Callable[[PromptProgress], None]], Generator[Event, None, None]
]


class Reply(Iterator[Token]):
    """An iterator over the tokens of one reply. Nothing is computed before the first one is requested.

    `cancel` may be called from any thread. A reply may be dropped before its end.
    """

    def __init__(
        self, write: Writer, *, prompt_tokens: int, seed: int, prepared: float = 0.0,
        first: Sequence[Notice | Explanation] = (),
    ) -> None:  # fmt: skip
        """Prepare the reply; `prepared` seconds have gone into the request already. `first` is delivered first."""
        self.prompt_tokens, self._seed, self._prepared = prompt_tokens, seed, prepared
        self._write, self._first = write, first
        self._listeners: dict[type, Callable[[Any], None]] = {}  # by the type of what they are told
        self._stats: Summary | None = None
        self._events: Generator[Event, None, None] | None = None
        self._should_stop = Stop()
        self._lock = threading.RLock()
        self._done_callbacks: list[weakref.finalize[..., Reply]] = []

    def __next__(self) -> Token:
        with self._lock:
            if self._events is None:
                self._start()
            try:
                for event in self._events or ():
                    if isinstance(event, Token):
                        return event
                    self._deliver(event)
            except Stopped:  # A stop ends the reply without an error.
                pass
            except BaseException:
                self._finish()
                raise
            self._finish()
            raise StopIteration

    @property
    def summary(self) -> Summary:
        """Return the reply's statistics: final after the last token, partial before it."""
        return self._stats or Summary(self.prompt_tokens, self._seed)

    @property
    def told(self) -> list[str]:
        """Return the explanations that were known before the reply began."""
        return [one.text for one in self._first if isinstance(one, Explanation)]

    def listen(
        self, on_notice: Callable[[Notice], None] | None = None,
        on_explain: Callable[[Explanation], None] | None = None,
        on_progress: Callable[[PromptProgress], None] | None = None,
    ) -> None:  # fmt: skip
        """Set callbacks, which are called in the iterating thread: `on_progress` while a long prompt is read, the
        others between tokens. Explanations are made only if `on_explain` is set before the first token."""
        wanted = {Notice: on_notice, Explanation: on_explain, PromptProgress: on_progress}
        self._listeners |= {kind: listener for kind, listener in wanted.items() if listener is not None}

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the reply has ended, or was cancelled, closed or dropped."""
        self._done_callbacks.append(weakref.finalize(self, callback))

    def cancel(self) -> None:
        """Cancel the reply: no token follows. Returns at once, even while another thread waits for a token."""
        self._should_stop.set()
        if self._lock.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Cancel the reply, and wait until other threads have left it."""
        self._should_stop.set()
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _start(self) -> None:
        if not self._should_stop():
            for event in self._first:
                self._deliver(event)
            self._stats = Summary(self.prompt_tokens, self._seed, self._prepared)
            self._events = self._write(self._stats, Explanation in self._listeners, self._should_stop, self._deliver)

    def _deliver(self, event: Notice | Explanation | PromptProgress) -> None:
        if (listener := self._listeners.get(type(event))) is not None:
            listener(event)

    def _finish(self) -> None:
        """Close the generator, with the lock held, unless it is running: a signal handler may interrupt this very
        thread."""
        if self._events is not None:
            if inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING:
                return
            self._events.close()
        for end in self._done_callbacks:
            end()

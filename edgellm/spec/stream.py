"""A reply: an iterator of tokens that can be stopped at any time and tells its figures at the end."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Self, TypeAlias

from edgellm.engine import Stop
from edgellm.errors import Stopped
from edgellm.spec.loop import Event
from edgellm.spec.stats import Stats
from edgellm.spec.types import Explanation, Notice, Summary, Token

# Takes the figures to fill, whether to explain, and a check whether the user has stopped the reply.
Writer: TypeAlias = Callable[[Stats, bool, Callable[[], bool]], Generator[Event, None, None]]


class Reply(Iterator[Token]):
    """An iterator over the tokens of one reply. Nothing is computed before the first is asked for.

    `cancel` may come from any thread. A reply that is dropped half-way leaves everything sound.
    """

    def __init__(
        self,
        write: Writer,
        *,
        prompt_tokens: int,
        seed: int,
        prepared: float = 0.0,
    ) -> None:
        """Prepare the reply; `prepared` seconds have gone into the request already."""
        self._on_notice: Callable[[Notice], None] | None = None
        self._on_explain: Callable[[Explanation], None] | None = None
        self._write = write
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._prepared = prepared
        self._stats: Stats | None = None
        self._events: Generator[Event, None, None] | None = None
        self._stopped = Stop()
        self._lock = threading.RLock()
        self._endings: list[weakref.finalize[..., Reply]] = []

    def __next__(self) -> Token:
        with self._lock:
            if self._events is None:
                self._start()
            try:
                for event in self._events or ():
                    if isinstance(event, Token):
                        return event
                    self._tell(event)
            except Stopped:  # as between two tokens
                pass
            except BaseException:
                self._finish()
                raise
            self._finish()
            raise StopIteration

    @property
    def summary(self) -> Summary:
        """Return the reply's figures: final after the last token, up to now before it."""
        return (self._stats or Stats()).summary(self._prompt_tokens, self._seed)

    def listen(
        self,
        on_notice: Callable[[Notice], None] | None = None,
        on_explain: Callable[[Explanation], None] | None = None,
    ) -> None:
        """Call these between tokens, in the thread that iterates. Explanations are made only where `on_explain` is
        given before the first token."""
        self._on_notice, self._on_explain = on_notice or self._on_notice, on_explain or self._on_explain

    def when_over(self, call: Callable[[], None]) -> None:
        """Call `call` once, when the reply has ended, or was cancelled, closed or dropped."""
        self._endings.append(weakref.finalize(self, call))

    def cancel(self) -> None:
        """Stop the reply: no token comes after this. Returns at once, even while another thread waits for a token."""
        self._stopped.set()
        if self._lock.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stop the reply, and wait until a thread that is inside it has left."""
        self._stopped.set()
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _start(self) -> None:
        if not self._stopped():
            self._stats = Stats(self._prepared)
            self._events = self._write(self._stats, self._on_explain is not None, self._stopped)

    def _tell(self, event: Notice | Explanation) -> None:
        if isinstance(event, Notice):
            if self._on_notice is not None:
                self._on_notice(event)
        elif self._on_explain is not None:
            self._on_explain(event)

    def _finish(self) -> None:
        """Close the generator, with the lock held, unless it is running: a signal handler may interrupt this very
        thread."""
        if self._events is not None:
            if inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING:
                return
            self._events.close()
        for end in self._endings:
            end()

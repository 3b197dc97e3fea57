"""The session of one reply with a verifier that takes requests, and the verdicts of that reply."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from edgellm.errors import SAME_VERSION, ProtocolError, Stopped, VerifierLost
from edgellm.spec.constraint import GrammarState, ReplyGrammar
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Notice, Sampling, Verdict

T = TypeVar("T")
POLL_SECONDS = 0.05  # seconds between two checks for a stopped reply, or a returned verifier
_LONG = 512  # new tokens of a prefix from which on its reading is reported
_NO_VERIFIER = Decision(False, "there is no verifier")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The origin of a request. Devices (`device`) are served in turns. Cached prompts are shared only within a
    `cache_salt`: otherwise the time of a verdict would reveal one device's prompts to another."""

    device: str = ""
    cache_salt: str = ""


HERE = Tenant()
"""Requests from the verifier's own process."""


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """A request for a verdict on `draft`, after the first `position` tokens that `session` holds and then `prefix`."""

    session: int
    sampling: Sampling
    position: int
    prefix: Ids
    draft: Chunk
    extra: int = 0  # most tokens that are written after the verdict's own
    logprobs: int | None = None  # the verdict has those of its tokens, and of so many others at each place
    round: int = 0  # number of the request in its session
    tenant: Tenant = HERE
    logits: bool = False  # a mesh also answers with the rows that the verdict depends on
    grammar: ReplyGrammar | None = None  # the session's, if `sampling` has a constraint
    computed: int = 0  # tokens of the text that the verifier has read


Send: TypeAlias = Callable[[VerifyRequest], Future[Verdict]]
Ahead: TypeAlias = Callable[..., None]
"""A function that drafts behind a chunk, until the function `until` returns True."""


def settled(verdict: Verdict) -> Future[Verdict]:
    """Return the future of a verdict that is there already."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


class Session:
    """One reply at a verifier that takes requests by a function: a request goes out, and its verdict comes."""

    def __init__(
        self, state: GenerationState, send: Send, *, number: int = 0,
        grammar: Callable[[str], GrammarState] | None = None,
        ready: Callable[[], bool] = lambda: True, close: Callable[[], None] = lambda: None, reads: str = "",
    ) -> None:  # fmt: skip
        """Send requests with the whole text by `send`. `ready` returns at no cost whether a request would be worked on
        now; `close` ends the reply at the other side. `grammar` compiles a JSON schema, if the reply's is applied
        here. `reads` is the name under which the reading of a long prompt is reported."""
        self.state, self._send, self._number = state, send, number
        constraint = state.sampling.constraint
        self._grammar = None if constraint is None else ReplyGrammar.of(constraint, grammar)
        self.ready, self._close = ready, close
        self._report = state.prompt_progress(reads) if reads else None
        self._round = self._read = 0
        self._asked: VerifyRequest | None = None
        self._pending: Future[Verdict] | None = None

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Future[Verdict]:
        """Ask for a verdict on `chunk` after `prefix` (all tokens so far, prompt included, shape (n,)).

        An empty chunk asks for the verifier's own next token; `extra` asks for up to that many further tokens written
        by the verifier alone. An earlier verdict that is not there yet is given up. The future fails with VerifierLost
        if the verifier is gone or makes no progress; the session stays usable, and `ready` says when to ask again.
        """
        if self._pending is not None:
            self._pending.cancel()
        state, self._round = self.state, self._round + 1
        self._read = 0 if self._asked is None else len(self._asked.prefix)
        self._asked = VerifyRequest(
            self._number,
            state.sampling,
            0,
            prefix,
            chunk,
            extra,
            state.terms.logprobs,
            self._round,
            grammar=self._grammar,
        )
        self._pending = self._send(self._asked)
        return self._pending

    def wait(self, pending: Future[Verdict]) -> Verdict:
        """Wait for a verdict, and report meanwhile how much of a long prefix has been read. Raise what the verifier
        failed with, or Stopped."""

        def stopped() -> bool:
            asked = self._asked
            if self._report is not None and asked is not None and (new := len(asked.prefix) - self._read) > _LONG:
                self._report(min(max(asked.computed - self._read, 0), new), new)
            return self.state.should_stop()

        try:
            return wait_for_result(pending, stopped)
        except CancelledError:
            raise VerifierLost("The connection to the verifier is closed.", "Ask again.") from None

    def close(self) -> None:
        """End the reply, and give up pending requests."""
        if self._pending is not None:
            self._pending.cancel()
        self._close()


def wait_for_result(future: Future[T], should_stop: Callable[[], bool]) -> T:
    """Return the result of `future`, or raise its exception. Raise Stopped as soon as `should_stop` returns True."""
    while not future.done() and not wait((future,), POLL_SECONDS).done:
        if should_stop():
            raise Stopped
    return future.result()


class Verification:
    """The verdicts of one reply, by a verifier that is never away or busy, or by none."""

    def __init__(self, state: GenerationState, session: Session | None) -> None:
        self._state, self._session = state, session

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now, or None where one can."""
        return _NO_VERIFIER if self._session is None else None

    def verify(self, chunk: Chunk, ahead: Ahead) -> Verdict | None:
        """Return the verdict on `chunk`, or None if the verifier is unavailable; `ahead` drafts meanwhile."""
        return None if self._session is None else self._verdict(self._session, chunk, ahead)

    def _verdict(self, session: Session, chunk: Chunk, ahead: Ahead) -> Verdict:
        """Return the verdict on `chunk`. Without a draft, extra tokens are asked for, as many as there is room for."""
        room = self._state.tokens_left - len(chunk) - 1
        extra = 0 if len(chunk) else max(0, min(self._state.limits.extra, room))
        pending = session.submit(self._state.ids, chunk, extra)
        if len(chunk):
            ahead(chunk, until=pending.done)
        return session.wait(pending)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices since the last call."""
        return iter(())

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        """Wait for a busy verifier after a round without a token. Return True if another round may bring one, False if
        there was no verifier to ask."""
        yield from ()
        if verdict is not None:
            raise ProtocolError("The verifier's answer contains no token.", SAME_VERSION)
        return False

    def close(self) -> None:
        """End the reply at the verifier."""
        if self._session is not None:
            self._session.close()

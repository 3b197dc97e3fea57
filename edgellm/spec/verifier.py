"""The session of one reply with a verifier that takes requests, and the verdicts of that reply."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TypeAlias, TypeVar

from edgellm.errors import (
    SAME_VERSION,
    MeshBroken,
    ProtocolError,
    Stopped,
    VerifierBusy,
    VerifierLost,
    VerifierSlow,
    VerifierUnavailable,
)  # fmt: skip
from edgellm.spec.constraint import GrammarState, ReplyGrammar
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Notice, Sampling, Verdict

T = TypeVar("T")
POLL_SECONDS = 0.05  # seconds between two checks for a stopped reply, or a returned verifier
_LONG = 512  # new tokens of a prefix from which on its reading is reported


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
            self._number, state.sampling, 0, prefix, chunk, extra, state.terms.logprobs, self._round,
            grammar=self._grammar,
        )  # fmt: skip
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


LOST = Notice("The verifier is gone. The draft model continues alone, and its tokens are not verified.")
SLOW = Notice("The verifier takes too long. The draft model continues alone, and its tokens are not verified.")
BACK = Notice("The verifier is back. Drafts are verified again.")
FREE = Notice("The verifier is no longer busy. Drafts are verified again.")

_NO_VERIFIER = Decision(False, "there is no verifier")
_AWAY, _BUSY = Decision(False, "the verifier is away"), Decision(False, "the verifier is busy")
_BUSY_LIMIT = 300.0  # seconds that a reply without a draft model waits for a verdict
_RETRY_SECONDS = 10.0  # seconds that a verifier which was too slow counts as busy
_MAX_SLOW = 3  # late verdicts in a row before giving up without a draft model


def _gone() -> VerifierLost:
    return VerifierLost(
        "The verifier is gone, and there is no draft model to continue with.",
        "Start the verifier again, or add a draft model.",
    )


class Verification:
    """The verdicts of one reply, with the losses and returns of the verifier turned into notices."""

    def __init__(
        self, state: GenerationState, session: Session | None, *, alone: bool = False, announce: bool = False
    ) -> None:
        """Use `session`; None: there is no verifier. `alone`: there is no drafter, so no reply without the verifier.
        `announce`: the verifier starts to read the prompt at once, in parallel with the device."""
        self._state, self._session, self._alone = state, session, alone
        self._error: VerifierUnavailable | None = None  # why the verifier is away or busy
        self._slow_verdicts = 0  # consecutive verdicts that were too late
        self._last_verdict = monotonic()  # time of the last verdict
        self._notices: list[Notice] = []
        self._prefill: Future[Verdict] | None = None
        if announce and session is not None and session.ready():
            with suppress(VerifierUnavailable):  # The first verdict will raise the error.
                self._prefill = session.submit(state.ids, Chunk())

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now: the verifier is missing, away or busy."""
        if self._session is None:
            return _NO_VERIFIER
        if self._session.ready():
            if self._error is not None:
                self._notify(FREE if isinstance(self._error, VerifierBusy) else BACK)
            self._error = None
            return None
        if self._error is None:
            self._handle(self._busy_at_first() or _gone())
        return _BUSY if isinstance(self._error, VerifierBusy) else _AWAY

    def verify(self, chunk: Chunk, ahead: Ahead) -> Verdict | None:
        """Return the verdict on `chunk`, or None if the verifier is unavailable; `ahead` drafts meanwhile. Without a
        draft, extra tokens are asked for, as many as there is room for."""
        session, state = self._session, self._state
        if session is None:
            return None
        extra = 0 if len(chunk) else max(0, min(state.limits.extra, state.tokens_left - 1))
        try:
            read, self._prefill = self._prefill, None
            if read is not None and len(chunk):
                ahead(chunk, until=read.done)
            before = None if read is None else session.wait(read)
            pending = session.submit(state.ids, chunk, extra)
            if len(chunk):
                ahead(chunk, until=pending.done)
            verdict = session.wait(pending)
        except (VerifierBusy, VerifierLost) as error:
            self._handle(error)
            return None
        if before is not None:
            up, down = verdict.bytes_up + before.bytes_up, verdict.bytes_down + before.bytes_down
            verdict = replace(verdict, bytes_up=up, bytes_down=down)
        self._slow_verdicts, self._last_verdict = 0, monotonic()
        return verdict

    def _busy_at_first(self) -> VerifierBusy | None:
        """Return the error of a verifier that was too busy to read the prompt."""
        read = self._prefill
        error = read.exception() if read is not None and read.done() and not read.cancelled() else None
        if not isinstance(error, VerifierBusy):
            return None
        self._prefill = None
        return error

    def _handle(self, error: VerifierBusy | VerifierLost) -> None:
        """Note that the verifier is unavailable. A slow one is asked again later if nothing else can write."""
        self._error = error
        if isinstance(error, VerifierBusy):
            continuation = "The reply waits for it" if self._alone else "The draft model continues alone, unverified"
            self._notices.append(Notice(f"The verifier is busy for about {error.seconds:.1f} seconds. {continuation}."))
        elif isinstance(error, VerifierSlow):
            self._slow_verdicts += 1
            if self._alone and self._slow_verdicts < _MAX_SLOW:
                self._error = VerifierBusy(error.what, error.next_step, _RETRY_SECONDS)
            self._notify(SLOW)
        else:
            self._notify(LOST)

    def _notify(self, news: Notice) -> None:
        if not self._alone:  # Without a drafter, an error ends the reply instead.
            self._notices.append(news)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices since the last call."""
        while self._notices:
            yield self._notices.pop(0)

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        """Wait for a busy verifier after a round without a token. Return True if another round may bring one, False if
        there was no verifier to ask."""
        if verdict is not None:
            raise ProtocolError("The verifier's answer contains no token.", SAME_VERSION)
        if isinstance(self._error, VerifierBusy):
            yield from self.notices()
            if (waited := monotonic() - self._last_verdict) > _BUSY_LIMIT:
                raise VerifierLost(
                    f"The verifier has been busy for {waited:.0f} seconds, and there is no draft model.",
                    "Try again later, use another verifier, or add a draft model.",
                )
            end = monotonic() + 1.5 * self._error.seconds + 1.0
            while monotonic() < end:
                if self._state.should_stop() or self._session is None or self._session.ready():
                    return True
                sleep(POLL_SECONDS)
            self._error = _gone()
        if self._error is not None:
            raise self._error if isinstance(self._error, MeshBroken | VerifierSlow) else _gone()
        return False

    def close(self) -> None:
        """End the reply at the verifier."""
        if self._session is not None:
            self._session.close()

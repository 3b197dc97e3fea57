"""The session at the verifier as the loop uses it: notices when the verifier is lost or busy, and when it is back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import TypeVar

from edgellm.errors import (
    SAME_VERSION,
    MeshBroken,
    ProtocolError,
    Stopped,
    VerifierBusy,
    VerifierLost,
    VerifierSlow,
    VerifierUnavailable,
)
from edgellm.spec.protocols import Drafter, Pending, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Decision, Notice, Verdict

T = TypeVar("T")
_RESULT_POLL = 0.05  # seconds between two polls of `should_stop`


def wait_for_result(future: Future[T], should_stop: Callable[[], bool] | None) -> T:
    """Return the result of `future`, or raise its exception. Raise Stopped as soon as `should_stop` returns True."""
    while not wait((future,), _RESULT_POLL).done:
        if should_stop is not None and should_stop():
            raise Stopped
    return future.result()


LOST = Notice("The verifier is gone. The draft model continues alone, and its tokens are not verified.")
SLOW = Notice("The verifier takes too long. The draft model continues alone, and its tokens are not verified.")
BACK = Notice("The verifier is back. Drafts are verified again.")
FREE = Notice("The verifier is no longer busy. Drafts are verified again.")

_NOTHING = Chunk()
_AWAY = Decision(False, "the verifier is away")
_BUSY = Decision(False, "the verifier is busy")
_NO_VERIFIER = Decision(False, "there is no verifier")
_BUSY_LIMIT = 300.0  # seconds without a verdict that a reply waits, where nothing else can write
_RETRY_SECONDS = 10.0  # seconds within which a verifier that was too slow is asked again
_BUSY_POLL = 0.02  # seconds between two polls of a busy verifier
_MAX_SLOW = 3  # of a verifier that is too slow, where nothing else can write,
_GIVE_UP_SECONDS = 60.0  # and no new try after this many seconds without a verdict
_BUSY_MARGIN = 1.5  # a busy verifier counts as lost after this factor times its announced seconds, plus one


class _AfterPrefill:
    """A verdict that is asked for once the verifier has read the prompt."""

    def __init__(self, prefill: Pending, submit: Callable[[], Pending]) -> None:
        self._prefill, self._submit = prefill, submit
        self._prefilled = Verdict(0, NO_IDS)
        self._pending: Pending | None = None
        self._error: VerifierUnavailable | None = None

    def done(self) -> bool:
        """See `Pending.done`. Raise nothing where the prompt could not be read: `result` does."""
        if self._pending is None and self._error is None and self._prefill.done():
            try:
                self._pending = self._next()
            except VerifierUnavailable as error:
                self._error = error
        return self._error is not None or (self._pending is not None and self._pending.done())

    def result(self) -> Verdict:
        """See `Pending.result`; the bytes of the prompt count."""
        if self._error is not None:
            raise self._error
        if self._pending is None:
            self._pending = self._next()
        verdict, before = self._pending.result(), self._prefilled
        bytes_up, bytes_down = verdict.bytes_up + before.bytes_up, verdict.bytes_down + before.bytes_down
        return replace(verdict, bytes_up=bytes_up, bytes_down=bytes_down)

    def _next(self) -> Pending:
        self._prefilled = self._prefill.result()
        return self._submit()


class GuardedSession:
    """A verifier's session, or none, with its losses and returns turned into notices."""

    def __init__(self, verifier: Verifier | None, state: GenerationState, *, alone: bool, announce: bool) -> None:
        """Open a session for the reply `state`.

        `alone`: there is no drafter, so no reply without the verifier. `announce`: the verifier starts to read the
        prompt at once, in parallel with the device. Raises the errors of `Verifier.open`.
        """
        self._session = None if verifier is None else verifier.open(state)
        self._alone, self._should_stop = alone, state.should_stop
        self._lost = False
        self._reason: VerifierLost | None = None  # why the verifier is lost, if more is known than that it is gone
        self._busy_seconds: float | None = None  # announced by the verifier; None if it is not busy
        self._slow_verdicts = 0  # consecutive verdicts that were too late
        self._last_verdict = monotonic()  # time of the last verdict
        self._verified = False  # True after the first verdict, before which the prompt was read
        self._notices: list[Notice] = []
        self._prefill: Pending | None = None
        if self._session is not None and announce and self._session.ready():
            with suppress(VerifierUnavailable):  # the first verdict will raise it
                self._prefill = self._session.submit(state.ids, _NOTHING)

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now, or None where one can."""
        if self._session is None:
            return _NO_VERIFIER
        ready = self._session.ready()
        if ready and self._lost:
            self._notify(BACK)
        elif ready and self._busy_seconds is not None:
            self._notify(FREE)
        elif not ready and not self._lost and self._busy_seconds is None and not self._busy_at_first():
            self._notify(LOST)
            self._lost = True
        if ready:
            self._lost, self._busy_seconds = False, None
            return None
        return _BUSY if self._busy_seconds is not None else _AWAY

    def verify(self, state: GenerationState, chunk: Chunk, drafter: Drafter) -> Verdict | None:
        """Return the verdict on `chunk`, or None if the verifier is unavailable. `drafter` drafts ahead meanwhile."""
        if self._session is None:
            return None
        try:
            tail = not len(chunk) if state.tail is None else state.tail.second()
            wanted = state.limits.extra if tail else 0
            extra = max(0, min(wanted, state.tokens_left - len(chunk) - 1))
            submit = partial(self._session.submit, state.ids, chunk, extra)
            prefill, self._prefill = self._prefill, None
            pending = submit() if prefill is None else _AfterPrefill(prefill, submit)
            if len(chunk):
                drafter.look_ahead(state, chunk, state.limits.gamma, pending.done)
            verdict = pending.result()
            began, self._last_verdict = self._last_verdict, monotonic()
            if state.tail is not None and self._verified:
                tokens = verdict.accepted + len(verdict.tokens)
                state.tail.record(tail, tokens, self._last_verdict - began)
            self._slow_verdicts, self._verified = 0, True
            return verdict
        except VerifierBusy as busy:
            self._handle_busy(busy)
        except VerifierSlow as error:
            self._handle_slow(error)
        except VerifierLost as error:
            self._lost = True
            self._reason = error if isinstance(error, MeshBroken) else None
            self._notify(LOST)
        return None

    def _busy_at_first(self) -> bool:
        """Return whether the verifier was too busy to read the prompt."""
        if self._prefill is None or not self._prefill.done():
            return False
        try:
            self._prefill.result()
        except VerifierBusy as busy:
            self._prefill = None
            self._handle_busy(busy)
            return True
        except VerifierUnavailable:
            pass
        return False

    def _handle_busy(self, busy: VerifierBusy) -> None:
        self._busy_seconds = busy.seconds
        continuation = "The reply waits for it" if self._alone else "The draft model continues alone, unverified"
        self._notices.append(Notice(f"The verifier is busy for about {busy.seconds:.1f} seconds. {continuation}."))

    def _handle_slow(self, error: VerifierSlow) -> None:
        """Handle a late verdict: retry later if nothing else can write, otherwise give the verifier up."""
        self._slow_verdicts += 1
        if self._alone and self._slow_verdicts < _MAX_SLOW and monotonic() - self._last_verdict < _GIVE_UP_SECONDS:
            self._busy_seconds = _RETRY_SECONDS
            return
        self._lost, self._reason = True, error
        self._notify(SLOW)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices since the last call."""
        while self._notices:
            yield self._notices.pop(0)

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        """Wait for a busy verifier after a round without a token. Return True if another round may bring one, False if
        there was no verifier to ask.

        Raises:
            VerifierLost: the verifier is gone, and nothing else can go on.
        """
        if verdict is not None:
            raise ProtocolError("The verifier's answer contains no token.", SAME_VERSION)
        if self._session is not None and self._busy_seconds is not None:
            yield from self.notices()
            if (waited := monotonic() - self._last_verdict) > _BUSY_LIMIT:
                raise VerifierLost(
                    f"The verifier has been busy for {waited:.0f} seconds, and there is no draft model.",
                    "Try again later, use another verifier, or add a draft model.",
                )
            end = monotonic() + _BUSY_MARGIN * self._busy_seconds + 1.0
            while monotonic() < end:
                if self._should_stop() or self._session.ready():
                    return True
                sleep(_BUSY_POLL)
            self._lost = True
        if self._lost:
            if self._reason is not None:
                raise self._reason
            raise VerifierLost(
                "The verifier is gone, and there is no draft model to continue with.",
                "Start the verifier again, or add a draft model.",
            )
        return False

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _notify(self, news: Notice) -> None:
        if not self._alone:  # without a drafter such news end the reply with an error instead
            self._notices.append(news)

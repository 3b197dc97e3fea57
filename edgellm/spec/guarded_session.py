"""The session at the verifier as the loop uses it: notices when the verifier is lost or busy, and when it is back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import TypeVar

from edgellm.errors import (
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
from edgellm.spec.types import Chunk, Decision, Notice, Verdict

T = TypeVar("T")
_RESULT_POLL = 0.05  # seconds between two checks whether the result is still wanted


def settled(future: Future[T], stopped: Callable[[], bool] | None) -> T:
    """Return the result, or raise what it raises. Raises Stopped if `stopped` says so before the result is there."""
    while not wait((future,), _RESULT_POLL).done:
        if stopped is not None and stopped():
            raise Stopped
    return future.result()


LOST = Notice("The verifier is gone: the reply goes on from the draft model alone, and what it writes is not checked.")
SLOW = Notice(
    "The verifier takes too long: the reply goes on from the draft model alone, and what it writes is not checked."
)
BACK = Notice("The verifier is back: drafts are checked again.")
FREE = Notice("The verifier has time again: drafts are checked again.")

_NOTHING = Chunk()
_AWAY = Decision(False, "the verifier is away")
_BUSY = Decision(False, "the verifier is busy")
_NO_VERIFIER = Decision(False, "there is no verifier")
_STARVED = 300.0  # seconds without a verdict that a reply waits, where nothing else can write
_AGAIN = 10.0  # seconds within which a verifier that was too slow is asked again
_BUSY_POLL = 0.02  # seconds between two looks whether a busy verifier has time
_TRIES = 3  # of a verifier that is too slow, where nothing else can write,
_SILENT = 60.0  # and no new try after this many seconds without a verdict
_LONGER = 1.5  # a busy verifier counts as gone after this times the seconds it said, plus one


class GuardedSession:
    """A verifier's session, or none, with its losses and returns turned into notices."""

    def __init__(self, verifier: Verifier | None, state: GenerationState, *, alone: bool, announce: bool) -> None:
        """Open a session for the reply `state`. `alone`: there is no drafter, so that without the verifier there is
        no reply. `announce`: the verifier begins to read the prompt while the device reads it too, and drafts, so
        that it is read before the first verdict is asked for. Raises what `Verifier.open` raises."""
        self._session = None if verifier is None else verifier.open(state)
        self._alone, self._stopped = alone, state.stopped
        self._lost = False
        self._reason: VerifierLost | None = None  # why the verifier is lost, if more is known than that it is gone
        self._busy: float | None = None  # seconds that the verifier said it is busy
        self._late = 0  # verdicts in a row that did not come in time
        self._heard = monotonic()  # when a verdict came last
        self._news: list[Notice] = []
        self._reading: Pending | None = None
        if self._session is not None and announce and self._session.ready():
            with suppress(VerifierUnavailable):  # the first verdict will raise it
                self._reading = self._session.submit(state.ids, _NOTHING)

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now, or None where one can."""
        if self._session is None:
            return _NO_VERIFIER
        ready = self._session.ready()
        if ready and self._lost:
            self._note(BACK)
        elif ready and self._busy is not None:
            self._note(FREE)
        elif not ready and not self._lost and self._busy is None:
            self._note(LOST)
            self._lost = True
        if ready:
            self._lost, self._busy = False, None
            return None
        return _BUSY if self._busy is not None else _AWAY

    def verify(self, state: GenerationState, chunk: Chunk, drafter: Drafter) -> Verdict | None:
        """Return the verdict on `chunk`, or None if none comes. `drafter` looks ahead meanwhile."""
        if self._session is None:
            return None
        try:
            sent = 0, 0
            if self._reading is not None:
                reading, self._reading = self._reading, None
                read = reading.result()
                sent = read.bytes_up, read.bytes_down
            extra = 0 if len(chunk) else min(state.limits.extra, state.room - 1)
            pending = self._session.submit(state.ids, chunk, extra)
            if len(chunk):
                drafter.look_ahead(state, chunk, state.limits.gamma, pending.done)
            verdict = pending.result()
            if any(sent):
                up, down = verdict.bytes_up + sent[0], verdict.bytes_down + sent[1]
                verdict = replace(verdict, bytes_up=up, bytes_down=down)
            self._late, self._heard = 0, monotonic()
            return verdict
        except VerifierBusy as busy:
            self._busy = busy.seconds
            goes_on = "the reply waits for it" if self._alone else "the reply goes on from the draft model alone"
            self._news.append(Notice(f"The verifier is busy for about {busy.seconds:.1f} seconds: {goes_on}."))
        except VerifierSlow as error:
            self._slow(error)
        except VerifierLost as error:
            self._lost = True
            self._reason = error if isinstance(error, MeshBroken) else None
            self._note(LOST)
        return None

    def _slow(self, error: VerifierSlow) -> None:
        """Handle a verdict that did not come in time: where nothing else can write, ask again later; otherwise give
        it up."""
        self._late += 1
        if self._alone and self._late < _TRIES and monotonic() - self._heard < _SILENT:
            self._busy = _AGAIN
            return
        self._lost, self._reason = True, error
        self._note(SLOW)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices since the last call."""
        while self._news:
            yield self._news.pop(0)

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        """Wait for a busy verifier after a round without a token. Return True if another round may bring one, False if
        there was no verifier to ask.

        Raises:
            VerifierLost: the verifier is gone, and nothing else can go on.
        """
        if verdict is not None:
            raise ProtocolError(
                "The verifier answered without a token.", "Run the same version of edgellm on both sides."
            )
        if self._session is not None and self._busy is not None:
            yield from self.notices()
            if (waited := monotonic() - self._heard) > _STARVED:
                raise VerifierLost(
                    f"The verifier has been too busy for {waited:.0f} seconds, and no draft model is there to go on.",
                    "Ask again later, ask another verifier, or draft with a small model.",
                )
            end = monotonic() + _LONGER * self._busy + 1.0
            while monotonic() < end:
                if self._stopped() or self._session.ready():
                    return True
                sleep(_BUSY_POLL)
            self._lost = True
        if self._lost:
            if self._reason is not None:
                raise self._reason
            raise VerifierLost(
                "The verifier is gone, and no draft model is there to go on.",
                "Start it again, or draft with a small model.",
            )
        return False

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _note(self, news: Notice) -> None:
        if not self._alone:  # without a drafter such news end the reply with an error instead
            self._news.append(news)

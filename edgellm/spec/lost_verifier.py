"""A verifier that can be lost or busy: the notices of the decoding loop, the deadline of a verdict across a link, and
the back-off before a retry."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic, sleep

from edgellm.errors import MeshBroken, VerifierBusy, VerifierLost, VerifierSlow, VerifierUnavailable
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Notice, Verdict
from edgellm.spec.verifier import POLL_SECONDS, Ahead, Session, Verification

LOST = Notice("The verifier is gone. The draft model continues alone, and its tokens are not verified.")
SLOW = Notice("The verifier takes too long. The draft model continues alone, and its tokens are not verified.")
BACK = Notice("The verifier is back. Drafts are verified again.")
FREE = Notice("The verifier is no longer busy. Drafts are verified again.")

_AWAY, _BUSY = Decision(False, "the verifier is away"), Decision(False, "the verifier is busy")
_BUSY_LIMIT = 300.0  # seconds that a reply without a draft model waits for a verdict
_RETRY_SECONDS = 10.0  # seconds that a verifier which was too slow counts as busy
_MAX_SLOW = 3  # late verdicts in a row before giving up without a draft model


def _gone() -> VerifierLost:
    return VerifierLost(
        "The verifier is gone, and there is no draft model to continue with.",
        "Start the verifier again, or add a draft model.",
    )


class LossyVerification(Verification):
    """The verdicts of one reply, with the losses and returns of the verifier turned into notices."""

    def __init__(self, state: GenerationState, session: Session, *, alone: bool, announce: bool) -> None:
        """Use `session`. `alone`: there is no drafter, so no reply without the verifier. `announce`: the verifier
        starts to read the prompt at once, in parallel with the device."""
        super().__init__(state, session)
        self._link, self._alone = session, alone
        self._error: VerifierUnavailable | None = None  # why the verifier is away or busy
        self._slow_verdicts = 0  # consecutive verdicts that were too late
        self._last_verdict = monotonic()  # time of the last verdict
        self._notices: list[Notice] = []
        self._prefill: Future[Verdict] | None = None
        if announce and session.ready():
            with suppress(VerifierUnavailable):  # The first verdict will raise the error.
                self._prefill = session.submit(state.ids, Chunk())

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now: the verifier is away or busy."""
        if self._link.ready():
            if self._error is not None:
                self._notify(FREE if isinstance(self._error, VerifierBusy) else BACK)
            self._error = None
            return None
        if self._error is None:
            self._handle(self._busy_at_first() or _gone())
        return _BUSY if isinstance(self._error, VerifierBusy) else _AWAY

    def verify(self, chunk: Chunk, ahead: Ahead) -> Verdict | None:
        try:
            read, self._prefill = self._prefill, None
            if read is not None and len(chunk):
                ahead(chunk, until=read.done)
            before = None if read is None else self._link.wait(read)
            verdict = self._verdict(self._link, chunk, ahead)
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

    def notices(self) -> Iterator[Notice]:
        while self._notices:
            yield self._notices.pop(0)

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        if verdict is None and isinstance(self._error, VerifierBusy):
            yield from self.notices()
            if (waited := monotonic() - self._last_verdict) > _BUSY_LIMIT:
                raise VerifierLost(
                    f"The verifier has been busy for {waited:.0f} seconds, and there is no draft model.",
                    "Try again later, use another verifier, or add a draft model.",
                )
            end = monotonic() + 1.5 * self._error.seconds + 1.0
            while monotonic() < end:
                if self._state.should_stop() or self._link.ready():
                    return True
                sleep(POLL_SECONDS)
            self._error = _gone()
        if verdict is None and self._error is not None:
            raise self._error if isinstance(self._error, MeshBroken | VerifierSlow) else _gone()
        return (yield from super().wait_until_ready(verdict))

    def _notify(self, news: Notice) -> None:
        if not self._alone:  # Without a drafter, an error ends the reply instead.
            self._notices.append(news)


SLACK_FACTOR = 5.0  # deadline over expected time of a verdict
FIRST_SECONDS, MAX_SECONDS = 25.0, 600.0  # added before a measurement; longest deadline
UNKNOWN_PASS = 1.0  # seconds of a pass before a measurement
SLOWEST_TOKEN = 0.05  # most seconds of a prompt token, which is never slower than a pass
FEW_TOKENS = 32  # tokens that hardly prolong a pass


@dataclass(frozen=True, slots=True)
class VerdictWork:
    """The work of a verdict for the verifier: reading `unseen` tokens, and up to `passes` passes of its model."""

    unseen: int
    passes: int


class VerdictDeadline:
    """The deadline of a verdict, from the fastest verdict so far. Belongs to a connection and its thread.

    A limit from typical times would follow a verifier that slows down gradually. After a verdict that missed its limit,
    the next limit is twice as long, up to four times, until one arrives: a verifier that has become slower for good is
    used again.
    """

    def __init__(self, minimum: float) -> None:
        """Start without a measurement; no limit is below `minimum` seconds."""
        self._minimum = minimum
        self._pass: float | None = None  # seconds of a pass with few tokens
        self._missed = 0

    def record(self, work: VerdictWork, seconds: float) -> None:
        """Record that a verdict took `seconds`. A first one that took very long may have loaded the model."""
        self._missed = 0
        if work.unseen <= FEW_TOKENS:
            known = FIRST_SECONDS / SLACK_FACTOR if self._pass is None else self._pass
            self._pass = min(known, seconds / work.passes)

    def record_miss(self) -> None:
        """Record that a verdict did not arrive within the limit."""
        self._missed = min(self._missed + 1, 2)

    def limit(self, work: VerdictWork) -> float:
        """Return the seconds after which the device continues alone."""
        pass_seconds = UNKNOWN_PASS if self._pass is None else self._pass
        expected = work.passes * pass_seconds + max(0, work.unseen - FEW_TOKENS) * min(pass_seconds, SLOWEST_TOKEN)
        seconds = max(self._minimum, SLACK_FACTOR * expected) * (1 << self._missed)
        if self._pass is None:  # The verifier may still have to load its model.
            seconds += FIRST_SECONDS
        return min(seconds, MAX_SECONDS)


class RetryDelay:
    """An exponential back-off: `first` seconds, doubled up to `most`, with a random half as jitter; and the time before
    which nothing is asked."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._failures = 0
        self._not_before = 0.0
        self._jitter = random.Random()

    def next(self) -> float:
        """Return the next delay, which is longer from failure to failure."""
        longest = min(self._first * 2.0**self._failures, self._most)
        self._failures = min(self._failures + 1, 16)
        return longest * self._jitter.uniform(0.5, 1.0)

    def pause(self, seconds: float | None = None) -> float:
        """Pause for the requested `seconds`, or for the next delay; return the seconds. Requested pauses are prolonged
        at random, so that not all devices come back at once."""
        wait = self.next() if seconds is None else seconds * self._jitter.uniform(1.0, 1.25)
        self._not_before = max(self._not_before, monotonic() + wait)  # Several sessions may set a delay.
        return wait

    @property
    def left(self) -> float:
        """Return the remaining seconds of the pause, 0 without a pause."""
        return max(0.0, self._not_before - monotonic())

    def reset(self) -> None:
        """Begin again with the first delay, after an answer."""
        self._failures = 0

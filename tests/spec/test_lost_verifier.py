"""A verifier that is busy, slow or lost: what is told, who writes meanwhile, and how long is waited for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import pytest

from edgellm.errors import Stopped, VerifierBusy, VerifierLost, VerifierSlow
from edgellm.spec.lost_verifier import FIRST_SECONDS, MAX_SECONDS, VerdictDeadline, VerdictWork
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Source, Verdict
from edgellm.spec.verifier import FREE, LOST, SLOW, Verification, VerifyRequest, wait_for_result
from tests.spec.fakes import FakeDrafter, FakeReply, FakeVerifier
from tests.spec.running import BIG, PROMPT, SMALL, alone, ids, notices, run, tokens

SECONDS = 0.05


@dataclass
class BusyReply(FakeReply):
    until: float = 0.0

    def ready(self) -> bool:
        return monotonic() >= self.until

    def verdict(self, request: VerifyRequest) -> Verdict:
        verifier = self.verifier
        assert isinstance(verifier, Busy)
        if self.asked in verifier.busy:
            self.until = monotonic() + (SECONDS if verifier.comes_back else 1e9)
            if verifier.slow:
                raise VerifierSlow("It is slow.", "Ask again.")
            raise VerifierBusy("It is busy.", "Ask again.", SECONDS)
        return super().verdict(request)


@dataclass
class Busy(FakeVerifier):
    busy: set[int] = field(default_factory=set)  # numbers of requests, from 1 on
    comes_back: bool = True
    slow: bool = False  # it says nothing of being busy

    def reply(self) -> FakeReply:
        return BusyReply(self)


def test_a_busy_verifier_is_not_told_as_gone_and_the_device_goes_on() -> None:
    events, summary = run(FakeDrafter(SMALL), Busy(BIG, busy={2}), max_tokens=60)
    told = [notice.text for notice in notices(events)]
    assert "busy for about 0.1 seconds" in told[0]
    assert "The draft model continues alone" in told[0]
    assert LOST.text not in told
    assert told[1:] in ([], [FREE.text])  # the reply may be over before
    assert summary.tokens == 60
    assert Source.DRAFT in {token.source for token in tokens(events)}


def test_without_a_drafter_a_busy_verifier_is_waited_for() -> None:
    began = monotonic()
    events, summary = run(None, Busy(BIG, busy={1, 3, 4}), max_tokens=12)
    assert ids(events) == alone(BIG, 12)
    assert [("The reply waits for it" in notice.text) for notice in notices(events)] == [True] * 3
    assert monotonic() - began >= 3 * SECONDS
    assert summary.finish_reason == "length"


def test_one_that_stays_away_longer_than_it_said_is_gone() -> None:
    with pytest.raises(VerifierLost, match="no draft model"):
        run(None, Busy(BIG, busy={2}, comes_back=False), max_tokens=12)


def test_from_one_that_is_too_slow_the_device_goes_on_alone() -> None:
    events, summary = run(FakeDrafter(SMALL), Busy(BIG, busy={2}, slow=True), max_tokens=60)
    assert next(iter(notices(events))).text == SLOW.text
    assert summary.tokens == 60


def test_without_a_drafter_one_that_is_too_slow_is_asked_again() -> None:
    events, _ = run(None, Busy(BIG, busy={2, 3}, slow=True), max_tokens=12)
    assert ids(events) == alone(BIG, 12)


@pytest.mark.parametrize("busy", [{1, 2, 3}, {2, 3, 4}])
def test_without_a_drafter_a_reply_does_not_wait_for_ever(busy: set[int]) -> None:
    with pytest.raises(VerifierSlow, match="slow"):
        run(None, Busy(BIG, busy=busy, slow=True), max_tokens=12)


def test_without_a_drafter_one_that_is_always_busy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.spec.verifier._BUSY_LIMIT", 0.2)
    with pytest.raises(VerifierLost, match="been busy for"):
        run(None, Busy(BIG, busy=set(range(2, 1000))), max_tokens=12)


READS = 3


class Reading(Future[Verdict]):
    """There once it has been looked for often enough."""

    def __init__(self, settle: Callable[[Future[Verdict]], None]) -> None:
        super().__init__()
        self._looks, self._settle = READS, settle

    def look(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            self._settle(self)


class ReadingReply(FakeReply):
    """A reply whose every verdict takes a while."""

    last: Reading

    def pending(self, request: VerifyRequest) -> Future[Verdict]:
        self.last = Reading(lambda found: self.settle(found, request))
        return self.last


class ReadingVerifier(FakeVerifier):
    def reply(self) -> FakeReply:
        return ReadingReply(self)


@dataclass
class Ahead(FakeDrafter):
    """Notes how many verdicts have been asked for whenever it looks whether this one is there, and is not to be
    interrupted by an error: its branches would be lost."""

    seen: list[int] = field(default_factory=list)
    asked: Callable[[], int] = lambda: 0
    look: Callable[[], None] = lambda: None

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        try:
            while not until():
                self.seen.append(self.asked())
                self.look()
        except VerifierLost:
            pytest.fail("the loss is for the verdict to tell")


def first_verdict(lost: list[int]) -> tuple[Verification, Ahead, Callable[[], Verdict | None]]:
    verifier, state = ReadingVerifier(BIG, lost=lost), GenerationState(PROMPT)
    verification = Verification(state, verifier.open(state), announce=True)
    (reply,) = verifier.sessions
    assert isinstance(reply, ReadingReply)
    drafter = Ahead(SMALL, asked=lambda: reply.asked, look=lambda: reply.last.look())
    chunk = drafter.propose(state, 4)
    return verification, drafter, lambda: verification.verify(chunk, partial(drafter.look_ahead, state, gamma=4))


def test_the_device_drafts_ahead_from_the_prompt_on_and_the_draft_is_sent_once_that_is_read() -> None:
    _, drafter, verify = first_verdict([])
    verdict = verify()
    assert drafter.seen == [1] * READS + [2] * READS
    assert verdict is not None
    assert (verdict.bytes_up, verdict.bytes_down) == (20, 40), "both requests count"


@pytest.mark.parametrize("lost", [[0], [1]])
def test_a_verifier_lost_at_either_request_is_noticed_after_drafting_ahead(lost: list[int]) -> None:
    session, drafter, verify = first_verdict(lost)
    assert verify() is None
    assert len(drafter.seen) >= READS
    assert LOST in list(session.notices())


def test_a_verdict_is_waited_for_as_long_as_its_work_may_take() -> None:
    patience = VerdictDeadline(2.0)
    assert FIRST_SECONDS < patience.limit(VerdictWork(10, 1)) < patience.limit(VerdictWork(1000, 1)) < MAX_SECONDS
    patience.record(VerdictWork(10, 1), 0.01)
    assert patience.limit(VerdictWork(5, 1)) == 2.0
    assert patience.limit(VerdictWork(4000, 1)) > 100.0
    patience.record(VerdictWork(10, 2), 4.0)  # slower than the first: no reason to wait for longer
    assert patience.limit(VerdictWork(5, 1)) == 2.0
    slow = VerdictDeadline(2.0)
    slow.record(VerdictWork(5, 1), 3.0)
    assert slow.limit(VerdictWork(5, 1)) == 15.0


def test_after_a_verdict_that_did_not_come_the_next_one_has_longer_up_to_a_limit() -> None:
    patience = VerdictDeadline(2.0)
    patience.record(VerdictWork(5, 1), 0.01)
    limits = []
    for _ in range(4):
        patience.record_miss()
        limits.append(patience.limit(VerdictWork(5, 1)))
    assert limits == [4.0, 8.0, 8.0, 8.0]
    patience.record(VerdictWork(5, 1), 3.0)
    assert patience.limit(VerdictWork(5, 1)) == 2.0


def test_what_the_work_raises_is_raised_even_where_it_is_a_timeout() -> None:
    future: Future[int] = Future()
    threading.Timer(0.1, lambda: future.set_exception(TimeoutError("of its own"))).start()
    with pytest.raises(TimeoutError, match="of its own"):
        wait_for_result(future, lambda: False)


def test_nobody_waits_for_what_is_not_wanted_any_more() -> None:
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(Stopped):
        wait_for_result(Future(), stopped)
    assert len(asked) == 3

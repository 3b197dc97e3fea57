"""A verifier that has no time for a while is told as that, and waited for where nobody else can write."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import pytest

from edgellm.errors import VerifierBusy, VerifierLost, VerifierSlow
from edgellm.spec.lost_verifier import FREE, LOST, SLOW
from edgellm.spec.types import Source, Verdict
from edgellm.spec.verifier import VerifyRequest
from tests.spec.fakes import FakeDrafter, FakeReply, FakeVerifier
from tests.spec.running import BIG, SMALL, alone, ids, notices, run, tokens

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


def test_without_a_drafter_one_that_was_silent_for_long_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.spec.lost_verifier._GIVE_UP_SECONDS", 0.0)
    with pytest.raises(VerifierSlow, match="slow"):
        run(None, Busy(BIG, busy={2}, slow=True), max_tokens=12)


def test_without_a_drafter_one_that_is_always_busy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.spec.lost_verifier._BUSY_LIMIT", 0.2)
    with pytest.raises(VerifierLost, match="been busy for"):
        run(None, Busy(BIG, busy=set(range(2, 1000))), max_tokens=12)

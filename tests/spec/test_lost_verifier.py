"""A verifier that is busy, slow or lost, and a reply that is stopped: no token is lost or repeated."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeError, EngineFailed, ProtocolError, Stopped, VerifierBusy, VerifierLost, VerifierSlow
from edgellm.spec.loop import BACK, FREE, LOST, SLOW, Verification
from edgellm.spec.protocols import GenerationLimits, GenerationState, Session, settled, wait_for_result
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Chunk, Explanation, Notice, Source, Token, Verdict
from edgellm.spec.verification import VerdictDeadline, VerdictWork
from tests.spec.fakes import FakeDrafter, FakeVerifier, chain
from tests.spec.running import BIG, PROMPT, SMALL, CoinGate, alone, check_provenance, going, ids, notices, run, tokens

BUSY, TOO_SLOW = VerifierBusy("It is busy.", "Ask again.", 0.05), VerifierSlow("It is slow.", "Ask again.")


@pytest.mark.parametrize(
    ("error", "first", "back"), [(BUSY, "busy for about 0.1 s", FREE), (TOO_SLOW, SLOW.text, BACK)]
)
def test_a_busy_or_slow_verifier_is_not_told_as_gone_and_the_device_goes_on(
    error: EdgeError, first: str, back: Notice
) -> None:
    events, summary = run(FakeDrafter(SMALL), FakeVerifier(BIG, {1}, error=error), max_tokens=60)
    told = [notice.text for notice in notices(events)]
    assert first in told[0]
    assert "The draft model continues alone" in told[0]
    assert told[1:] == [back.text]
    assert summary.tokens == 60
    assert Source.DRAFT in {token.source for token in tokens(events)}


@pytest.mark.parametrize("error", [BUSY, TOO_SLOW])
def test_without_a_drafter_a_busy_or_slow_verifier_is_waited_for(error: EdgeError) -> None:
    events, summary = run(None, FakeVerifier(BIG, {0, 2}, error=error), max_tokens=12)
    assert ids(events) == alone(BIG, 12)
    told = [notice.text for notice in notices(events)]
    assert ["The reply waits for it" in text for text in told] == [True] * 2 * (error is BUSY)
    assert summary.finish_reason == "length"


@pytest.mark.parametrize(
    ("verifier", "error", "says"),
    [
        (FakeVerifier(BIG, {1}, 10**9, error=BUSY), VerifierLost, "no draft model"),  # for longer than it said
        (FakeVerifier(BIG, {0, 1, 2}, error=TOO_SLOW), VerifierSlow, "slow"),
        (FakeVerifier(BIG, {1, 2, 3}, error=TOO_SLOW), VerifierSlow, "slow"),
        (FakeVerifier(BIG, range(1, 1000), error=BUSY), VerifierLost, "been busy for"),
    ],
)
def test_without_a_drafter_a_reply_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, verifier: FakeVerifier, error: type[EdgeError], says: str
) -> None:
    monkeypatch.setattr("edgellm.spec.loop.Verification.busy_limit", 0.2)
    with pytest.raises(error, match=says):
        run(None, verifier, max_tokens=12)


READS = 3


@dataclass
class Ahead(FakeDrafter):
    """Notes how many verdicts have been asked for whenever it looks whether this one is there, and is not to be
    interrupted by an error: its branches would be lost."""

    seen: list[int] = field(default_factory=list)
    asked: Callable[[], int] = lambda: 0

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        try:
            while not until():
                self.seen.append(self.asked())
        except VerifierLost:
            pytest.fail("the loss is for the verdict to tell")


def first_verdict(lost: list[int]) -> tuple[Verification, Ahead, Callable[[], Verdict | None]]:
    verifier, state = FakeVerifier(BIG, lost, looks=READS), GenerationState(PROMPT)
    verification = Verification(state, verifier.open(state), reads_ahead=True)
    (reply,) = verifier.sessions
    drafter = Ahead(SMALL, asked=lambda: reply.asked)
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
    limits = [patience.limit(VerdictWork(unseen, 1)) for unseen in (10, 1000)]
    assert patience.first_seconds < limits[0] < limits[1] < patience.max_seconds
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


LIMITS = GenerationLimits(30, 1000)

# --- the verifier lost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absence", [0, 1, 3, 100])
@pytest.mark.parametrize("lost", range(9))
def test_the_verifier_lost_at_every_round(lost: int, absence: int) -> None:
    verifier = FakeVerifier(BIG, lost=[lost], absence=absence)
    events, summary = run(FakeDrafter(SMALL), verifier, max_tokens=80)
    written = tokens(events)
    assert len(written) == 80
    check_provenance(written, BIG, SMALL)
    assert notices(events) == ([LOST, BACK] if absence < 5 else [LOST])
    at = events.index(LOST)
    assert tokens(events[at + 1 : at + 5])[0].source is Source.DRAFT  # what was on its way is kept at once
    assert {t.source for t in tokens(events[:at])} <= {Source.ACCEPTED, Source.CORRECTED, Source.BONUS}
    if absence < 5:
        back = events.index(BACK)
        assert {t.source for t in tokens(events[at:back])} == {Source.DRAFT}
        assert Source.DRAFT not in {t.source for t in tokens(events[back:])}
    assert summary.share_verified != 1.0
    assert summary.finish_reason == "length"


def test_a_verifier_that_can_be_reached_and_refuses_is_not_back() -> None:
    events, _ = run(FakeDrafter(SMALL), FakeVerifier(BIG, lost=range(2, 5)), max_tokens=80)
    assert notices(events) == [LOST, BACK]


@given(
    lost=st.sets(st.integers(0, 12)),
    absence=st.integers(0, 4),
    sides=st.lists(st.booleans(), min_size=1, max_size=5),
    gamma=st.integers(1, 6),
    most=st.integers(1, 40),
    ends=st.tuples(st.none() | st.integers(3, 45), st.none() | st.integers(3, 45)),
)
def test_whatever_fails_each_token_follows_from_all_before_it(
    lost: set[int], absence: int, sides: list[bool], gamma: int, most: int, ends: tuple[int | None, int | None]
) -> None:
    big = chain(1, eog_at=ends[0])
    small = chain(2, eog_at=ends[1], like=big)
    verifier = FakeVerifier(big, lost, absence)
    events, summary = run(FakeDrafter(small), verifier, CoinGate(sides), max_tokens=most, gamma=gamma, explain=True)
    written = tokens(events)
    check_provenance(written, big, small)
    assert summary.tokens == len(written) <= most
    assert summary.text.encode() == b"".join(token.piece for token in written)
    assert (summary.finish_reason == "length") == (len(written) == most)
    assert [note is LOST for note in notices(events)] == [i % 2 == 0 for i in range(len(notices(events)))]
    vouched = sum(token.source is not Source.DRAFT for token in written)
    assert summary.share_verified is None or summary.share_verified == vouched / max(1, len(written))
    assert [e.round for e in events if isinstance(e, Explanation)] == list(range(summary.rounds))


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("drafter", [None, FakeDrafter(SMALL, silent=True)], ids=["none", "silent"])
def test_without_a_draft_model_a_lost_verifier_is_an_error(lost: int, drafter: FakeDrafter | None) -> None:
    verifier = FakeVerifier(BIG, lost=[lost])
    stats = Summary()
    reply = going(GenerationState(PROMPT, GREEDY, LIMITS), drafter, verifier, stats=stats)
    written: list[int] = []
    with pytest.raises(VerifierLost, match="no draft model"):
        written.extend(event.id for event in reply if isinstance(event, Token) or pytest.fail(str(event)))
    assert written == alone(BIG, lost)
    assert stats.finish_reason == "cancelled"
    assert verifier.sessions[0].closed


def test_a_verdict_without_a_token_is_an_error_and_no_endless_loop() -> None:
    class Mute(FakeVerifier):
        def open(self, state: GenerationState) -> Session:
            session = super().open(state)
            return Session(state, lambda _: settled(Verdict(0, np.empty(0, np.int32))), close=session.close)

    with pytest.raises(ProtocolError, match="contains no token"):
        run(None, Mute(BIG))


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("after", range(12))
def test_a_reply_may_be_closed_or_stopped_after_any_token(after: int, stops: bool) -> None:
    """Also in the middle of a chunk."""
    verifier, stats = FakeVerifier(BIG), Summary()
    state = GenerationState(PROMPT, GREEDY, LIMITS, should_stop=lambda: stops and stats.tokens == after)
    reply = going(state, FakeDrafter(SMALL), verifier, stats=stats)
    written = list(islice(reply, None if stops else after))
    reply.close()
    assert ids(written) == alone(BIG, after)
    assert (stats.tokens, stats.finish_reason) == (after, "cancelled")
    assert all(session.closed for session in verifier.sessions)


def test_a_drafter_that_cannot_begin_leaves_no_session_open() -> None:
    class Broken(FakeDrafter):
        def begin(self, state: GenerationState) -> None:
            raise EngineFailed("No memory.", "Make room.")

    verifier = FakeVerifier(BIG)
    with pytest.raises(EngineFailed):
        run(Broken(SMALL), verifier)
    assert [session.closed for session in verifier.sessions] == [True]

"""The loop when the verifier fails or the user has had enough: no token is lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EngineFailed, ProtocolError, VerifierLost
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Explanation, Source, Token, Verdict
from edgellm.spec.verifier import BACK, LOST, Session, settled
from tests.spec.fakes import FakeDrafter, FakeReply, FakeVerifier, chain
from tests.spec.running import BIG, PROMPT, SMALL, CoinGate, alone, check_provenance, going, ids, notices, run, tokens

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


def test_a_verifier_that_is_away_from_the_start() -> None:
    class Late(FakeVerifier):
        def reply(self) -> FakeReply:
            return FakeReply(self, away=3)

    events, _ = run(FakeDrafter(SMALL), Late(BIG))
    assert events[0] is LOST
    assert notices(events) == [LOST, BACK]
    check_provenance(tokens(events), BIG, SMALL)


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


@pytest.mark.parametrize("after", range(12))
def test_closing_after_any_token(after: int) -> None:
    verifier, stats = FakeVerifier(BIG), Summary()
    reply = going(GenerationState(PROMPT, GREEDY, LIMITS), FakeDrafter(SMALL), verifier, stats=stats)
    written = [next(reply) for _ in range(after)]
    reply.close()
    assert ids(written) == alone(BIG, after)
    assert (stats.tokens, stats.finish_reason) == (after, "cancelled")
    assert all(session.closed for session in verifier.sessions)


@pytest.mark.parametrize("after", range(8))
def test_stopping_between_tokens_stops_in_the_middle_of_a_chunk(after: int) -> None:
    stats, verifier = Summary(), FakeVerifier(BIG)
    state = GenerationState(PROMPT, GREEDY, LIMITS, should_stop=lambda: stats.tokens == after)
    assert ids(going(state, FakeDrafter(SMALL), verifier, stats=stats)) == alone(BIG, after)
    assert stats.finish_reason == "cancelled"
    assert verifier.sessions[0].closed


def test_a_drafter_that_cannot_begin_leaves_no_session_open() -> None:
    class Broken(FakeDrafter):
        def begin(self, state: GenerationState) -> None:
            raise EngineFailed("No memory.", "Make room.")

    verifier = FakeVerifier(BIG)
    with pytest.raises(EngineFailed):
        run(Broken(SMALL), verifier)
    assert [session.closed for session in verifier.sessions] == [True]

"""The loop: who writes, where a reply ends, and its figures."""

from dataclasses import replace

import numpy as np
import pytest

from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import merge
from edgellm.spec.protocols import Gate, GenerationState
from edgellm.spec.types import Chunk, Drafted, Explanation, Source, Token, Verdict
from tests.spec.fakes import EOG, FakeDrafter, FakeVerifier, chain
from tests.spec.running import BIG, PROMPT, SMALL, alone, ids, notices, run, tokens

# --- who writes -----------------------------------------------------------------------------------------------------


def test_never_verifying_writes_what_the_draft_model_alone_writes() -> None:
    for verifier in (FakeVerifier(BIG), None):
        events, summary = run(FakeDrafter(SMALL), verifier, NeverGate())
        assert ids(events) == alone(SMALL, 30)
        assert {token.source for token in tokens(events)} == {Source.DRAFT}
        assert (summary.share_verified, summary.acceptance_rate, summary.mean_acceptance_length) == (None, None, None)
        assert summary.verifier_passes_per_token == 0


@pytest.mark.parametrize("extra", [0, 1, 7, 100])
def test_the_verifier_alone(extra: int) -> None:
    verifier = FakeVerifier(BIG)
    events, summary = run(None, verifier, extra=extra)
    assert ids(events) == alone(BIG, 30)
    assert {token.source for token in tokens(events)} == {Source.VERIFIER}
    assert verifier.sessions[0].asked == -(-30 // (extra + 1))
    assert summary.verifier_passes_per_token == 1
    assert (summary.share_verified, summary.acceptance_rate) == (1.0, None)


@pytest.mark.parametrize("copies", [True, False])
def test_behind_a_copy_the_verifier_writes_on(copies: bool) -> None:
    verifier = FakeVerifier(BIG)
    events, _ = run(FakeDrafter(SMALL, copies=copies), verifier, extra=7)
    assert ids(events) == alone(BIG, 30)
    assert (verifier.sessions[0].asked <= 4) is copies


def test_a_drafter_with_nothing_to_say_leaves_the_word_to_the_verifier_and_without_one_the_reply_ends() -> None:
    events, _ = run(FakeDrafter(SMALL, silent=True), FakeVerifier(BIG), NeverGate(), extra=7)
    assert ids(events) == alone(BIG, 30)
    assert {token.source for token in tokens(events)} == {Source.VERIFIER}
    events, summary = run(FakeDrafter(SMALL, silent=True), None)
    assert (events, summary.finish_reason) == ([], "stop")


def test_what_is_known_of_a_drafted_token_stays_with_it() -> None:
    known = Chunk(
        np.array([5, 6, 7], np.int32), np.array([0.5, 0.25, 1.0], np.float32),
        drafted=(Drafted(1.0, 0.125, 5), Drafted(1.0, 0.75), Drafted(1.0, 0.0, 5)), ahead=1,
    )  # fmt: skip
    drafts = [
        Token(5, b"", Source.PARALLEL, 0.5, 0.125, 5, 3),
        Token(6, b"", Source.DRAFT, 0.25, 0.75, None, 3),
        Token(7, b"", Source.DRAFT, 1.0, 0.0, 5, 3),
    ]
    assert merge(known, None, 3) == drafts
    for n in range(4):
        own = Source.BONUS if n == 3 else Source.CORRECTED
        assert merge(known, Verdict(n, np.array([8, 9], np.int32)), 3) == [
            *(replace(token, source=Source.ACCEPTED) for token in drafts[:n]),
            Token(8, b"", own, round=3),
            Token(9, b"", Source.VERIFIER, round=3),
        ]
    copied = merge(Chunk(known.ids, retrieved=True), Verdict(1, np.array([9], np.int32)))
    assert [token.source for token in copied] == [Source.RETRIEVED, Source.CORRECTED]


# --- where a reply ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
@pytest.mark.parametrize("at", range(12))
def test_the_end_of_the_turn_at_every_place(at: int, gamma: int) -> None:
    big = chain(1, eog_at=len(PROMPT) + at)
    for small in (chain(2, like=big), chain(2, eog_at=len(PROMPT) + at, like=big), chain(2, eog_at=5, like=big), big):
        events, summary = run(FakeDrafter(small), FakeVerifier(big), gamma=gamma)
        assert ids(events) == alone(big, 30)
        assert len(ids(events)) == at == summary.tokens
        assert summary.finish_reason == "stop"
        assert EOG not in ids(events)
        events, summary = run(FakeDrafter(small), None, gamma=gamma)
        assert ids(events) == alone(small, 30)
        assert summary.finish_reason == ("stop" if len(ids(events)) < 30 else "length")
    assert ids(run(None, FakeVerifier(big), extra=gamma)[0]) == alone(big, 30)


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("most", range(1, 14))
def test_max_tokens_at_every_value(most: int, gamma: int) -> None:
    events, summary = run(FakeDrafter(SMALL), FakeVerifier(BIG), max_tokens=most, gamma=gamma)
    assert ids(events) == alone(BIG, most)
    assert (summary.tokens, summary.finish_reason, notices(events)) == (most, "length", [])
    assert len(ids(run(FakeDrafter(SMALL), None, max_tokens=most, gamma=gamma)[0])) == most
    assert len(ids(run(None, FakeVerifier(BIG), max_tokens=most, extra=gamma)[0])) == most


@pytest.mark.parametrize("room", range(1, 10))
def test_a_full_context_ends_the_reply_with_a_notice(room: int) -> None:
    context = len(PROMPT) + room
    for drafter in (FakeDrafter(SMALL), None):
        events, summary = run(drafter, FakeVerifier(BIG, context_length=context), context=context, extra=5)
        assert ids(events) == alone(BIG, room)
        assert summary.finish_reason == "length"
        assert [str(context) in notice.text for notice in notices(events)] == [True]


def test_a_drafter_that_says_too_much_is_cut() -> None:
    class Chatty(FakeDrafter):
        def propose(self, state: GenerationState, gamma: int) -> Chunk:
            return super().propose(state, gamma + 3)

    assert ids(run(Chatty(SMALL), None, max_tokens=6)[0]) == alone(SMALL, 6)
    assert ids(run(Chatty(SMALL), FakeVerifier(BIG), max_tokens=6)[0]) == alone(BIG, 6)


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_reply() -> None:
    events, summary = run(FakeDrafter(SMALL), FakeVerifier(BIG))
    written = tokens(events)
    kinds = [token.source for token in written]
    rounds = len({token.round for token in written})
    assert (summary.rounds, summary.chunks_verified) == (rounds, rounds)
    assert summary.bytes_up == 10 * rounds
    assert summary.bytes_down == 20 * rounds
    assert summary.verifier_passes_per_token == rounds / 30
    # the last round may be cut by max_tokens; the ones before it are all there
    accepted, corrected = kinds.count(Source.ACCEPTED), kinds.count(Source.CORRECTED)
    assert summary.acceptance_rate == pytest.approx(accepted / (accepted + corrected), abs=0.05)
    assert summary.mean_acceptance_length == pytest.approx(30 / rounds, abs=5 / rounds)
    assert summary.ttft_ms is not None
    assert summary.tokens_per_second is not None
    assert summary.ttft_ms > 0 < summary.tokens_per_second


def test_agreeing_models_have_full_marks() -> None:
    big = chain(1, eog_at=len(PROMPT) + 13)  # 5, 5, then 3 and the end of the turn, with no bonus behind it
    _, summary = run(FakeDrafter(big), FakeVerifier(big))
    assert summary.acceptance_rate == 1.0
    assert (summary.chunks_verified, summary.chunks_accepted_whole) == (3, 3)
    assert summary.mean_acceptance_length == pytest.approx(14 / 3)


def test_a_reply_without_a_token_has_no_figures() -> None:
    big = chain(1, eog_at=len(PROMPT))
    events, summary = run(None, FakeVerifier(big))
    assert (events, summary.tokens, summary.text, summary.finish_reason) == ([], 0, "", "stop")
    assert (summary.ttft_ms, summary.tokens_per_second, summary.verifier_passes_per_token) == (None, None, None)


def test_explanations_tell_what_was_decided_and_why() -> None:
    def told(verifier: FakeVerifier | None, gate: Gate) -> str:
        return next(
            e.text for e in run(FakeDrafter(SMALL), verifier, gate, explain=True)[0] if isinstance(e, Explanation)
        )

    assert "verifies everything" in told(FakeVerifier(BIG), AlwaysGate())
    assert "accepted" in told(FakeVerifier(BIG), AlwaysGate())
    assert "verifies nothing" in told(FakeVerifier(BIG), NeverGate())
    assert "no verifier" in told(None, AlwaysGate())
    assert "no verdict came" in told(FakeVerifier(BIG, lost=[0]), AlwaysGate())
    assert not any(isinstance(e, Explanation) for e in run(FakeDrafter(SMALL), FakeVerifier(BIG))[0])

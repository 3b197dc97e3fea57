"""Retrieved drafts in the loop, with models made of arithmetic: the text is the verifier's own, whatever is copied."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import VerifierLost
from edgellm.spec.draft_length import CostCurve, DraftLengthController
from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import generate, merge
from edgellm.spec.ngram.draft_index import MOST_TOKENS, DraftIndex, PastConversation
from edgellm.spec.params import SOURCES
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Expected, Explanation, Sampling, Source, Token, Verdict
from tests.spec.fakes import EOG, FakeDrafter, FakeVerifier, Letters, chain, markov
from tests.spec.ngram.rounds import taken, told

CHEAP = CostCurve((1, 64), (1.0, 1.1))


class Believed(DraftLengthController):
    """A curve that is believed whatever decodes take: those of arithmetic take less time than a lookup."""

    def learn(self, drafted: int | None, tokens: int, seconds: float) -> None: ...

    def learn_plain(self, rounds: int, seconds: float) -> None: ...


def memory(*sources: str, curve: CostCurve = CHEAP, length: DraftLengthController | None = None) -> DraftIndex:
    return DraftIndex(
        sources or SOURCES, curve, lambda token: token % 3 == 0, lambda token: token == EOG, length=length
    )


def reply(
    known: DraftIndex, prompt: list[int], verifier: FakeVerifier, *, sampling: Sampling = GREEDY, model: bool = False
) -> tuple[list[Token], Stats]:
    ids = np.array(prompt, dtype=np.int32)
    own = taken(known, ids)
    drafter = HybridDrafter(own, FakeDrafter(verifier.logits), 3) if model else own
    stats = Stats()
    try:
        events = generate(
            GenerationState(ids, sampling, GenerationLimits(40, 200, 63)),
            vocabulary=Letters(),
            drafter=drafter,
            gate=AlwaysGate(),
            verifier=verifier,
            stats=stats,
        )
        tokens = [event for event in events if isinstance(event, Token)]
    finally:
        known.give()
    known.add(PastConversation(prompt, stats.ids))
    return tokens, stats


def plain(prompt: list[int], verifier: FakeVerifier, sampling: Sampling = GREEDY) -> list[int]:
    events = generate(
        GenerationState(np.array(prompt, dtype=np.int32), sampling, GenerationLimits(40, 200)),
        vocabulary=Letters(),
        drafter=None,
        gate=AlwaysGate(),
        verifier=verifier,
        stats=Stats(),
    )
    return [event.id for event in events if isinstance(event, Token)]


@settings(max_examples=40)
@given(
    st.sets(st.sampled_from(sorted(SOURCES)), min_size=1),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(0, 99),
    st.booleans(),
)
def test_copying_never_changes_the_text(sources: set[str], prompts: list[list[int]], seed: int, model: bool) -> None:
    known = memory(*sources)
    verifier = FakeVerifier(markov(seed, 10, sharpness=4.0))
    for prompt in prompts:
        tokens, _ = reply(known, prompt, verifier, model=model)
        assert [token.id for token in tokens] == plain(prompt, verifier)


def test_what_was_replied_before_is_copied_and_takes_fewer_passes() -> None:
    known, verifier = memory(), FakeVerifier(chain(3, eog_at=30))
    first, before = reply(known, [1, 2, 3], verifier)
    again, after = reply(known, [1, 2, 3], verifier)
    assert [token.id for token in first] == [token.id for token in again]
    assert before.rounds > 3 * after.rounds
    assert Source.RETRIEVED in {token.source for token in again}
    assert after.finish_reason == "stop"


def test_each_source_alone_finds_what_it_is_for() -> None:
    verifier = FakeVerifier(chain(3, eog_at=30))
    for source in ("history", "analogy"):
        known = memory(source, length=Believed(CHEAP))
        reply(known, [1, 2, 3], verifier)
        assert reply(known, [1, 2, 3], verifier)[1].accepted > 10, source
    loop = FakeVerifier(lambda prefix: np.eye(10, dtype=np.float32)[1 + int(prefix[-1]) % 5] * 9)
    assert reply(memory("context"), [1, 2, 3, 4, 5, 1, 2], loop)[1].accepted > 20


def test_rows_that_keep_a_decode_as_long_as_the_last_are_no_more_than_there_is_room_for() -> None:
    flat = CostCurve((1, 64), (1.0, 1.001), change=2.0)  # another number of rows costs more than arbitrary rows
    known, prompt = memory("context", curve=flat), [1, 2, 3, 4, 5] * 6
    known.allowance.settle(-10.0)
    drafter = taken(known, prompt)
    state = GenerationState(np.array(prompt, dtype=np.int32))
    for _ in range(9):
        chunk = drafter.propose(state, 63)
        told(drafter, chunk, Verdict(len(chunk), np.array([1], dtype=np.int32)))
    assert len(chunk) == 63
    assert 0 < len(drafter.propose(state, 20)) <= 20
    known.give()


def test_what_the_verifier_expects_while_it_reads_is_drafted() -> None:
    known = memory("calibration")
    drafter = taken(known, np.array([1, 2, 3, 1], dtype=np.int32))
    ids = np.array([[3], [9], [8], [9]], dtype=np.int32)
    drafter.expect(Expected(0, ids, np.full((4, 1), 0.9, dtype=np.float32)))
    chunk = drafter.propose(GenerationState(np.array([1, 2, 3, 1], dtype=np.int32)), 3)
    assert chunk.ids.tolist() == [3, 8]  # behind 1 it expects 3, and behind 3 it expects 8
    known.give()


def test_a_rejected_draft_is_used_again_behind_its_correction() -> None:
    known = memory("context", "reuse")
    prompt = np.array([1, 2, 4, 5, 7, 8, 1], dtype=np.int32)
    drafter = taken(known, prompt)
    chunk = drafter.propose(GenerationState(prompt), 5)
    assert chunk.ids.tolist() == [2, 4, 5, 7, 8]
    verdict = Verdict(0, np.array([10], dtype=np.int32), plausible=(False, True, True, True, False))
    told(drafter, chunk, verdict, 1.0)
    again = drafter.propose(GenerationState(np.append(prompt, 10).astype(np.int32)), 5)
    assert again.ids.tolist()[:3] == [4, 5, 7]
    known.give()


def test_where_copying_does_not_pay_nothing_is_copied_and_the_reason_says_so() -> None:
    known = memory(curve=CostCurve((1, 2, 64), (1.0, 4.0, 200.0)))
    prompt = np.array([1, 2, 3, 1, 2], dtype=np.int32)
    drafter = taken(known, prompt)
    chunk = drafter.propose(GenerationState(prompt, explain=True), 10)
    assert len(chunk) == 0
    assert "costs 300%" in chunk.reason
    known.give()


def test_beside_a_small_model_the_better_of_the_two_drafts() -> None:
    class Slow(FakeDrafter):
        def propose(self, state: GenerationState, gamma: int) -> Chunk:
            asked.append(gamma)
            return super().propose(state, gamma)

    asked: list[int] = []
    known = memory("context")
    prompt = np.array([1, 2, 3, 4, 9], dtype=np.int32)
    own = taken(known, prompt)
    mixed = HybridDrafter(own, Slow(markov(1, 10)), 3, linked=True)
    first = mixed.propose(GenerationState(prompt), 63)
    assert asked == [3]  # nothing to copy, and no more than the model's own length
    assert not first.retrieved
    for _ in range(8):
        told(mixed, first, Verdict(0, np.array([1], dtype=np.int32)), 5.0)
    copied = mixed.propose(GenerationState(np.array([1, 2, 3, 4, 9, 1, 2], dtype=np.int32)), 63)
    assert copied.retrieved
    assert asked == [3]
    known.give()


@pytest.mark.parametrize("model", [False, True])
def test_what_is_copied_never_stands_unchecked(model: bool) -> None:
    known = memory()
    reply(known, [1, 2, 3], FakeVerifier(chain(3, eog_at=30)), model=model)
    verifier = FakeVerifier(chain(3, eog_at=30), lost={1, 3}, absence=2)
    own = taken(known, np.array([1, 2, 3], dtype=np.int32))
    small = FakeDrafter(chain(99))  # disagrees with the verifier, and with all that can be copied
    events = generate(
        GenerationState(np.array([1, 2, 3], dtype=np.int32), GREEDY, GenerationLimits(40, 200, 5)),
        vocabulary=Letters(),
        drafter=HybridDrafter(own, small, 3) if model else own,
        gate=AlwaysGate(),
        verifier=verifier,
        stats=Stats(),
    )
    text = [1, 2, 3]
    lost = False
    try:
        for event in events:
            if not isinstance(event, Token):
                continue
            if event.source is Source.DRAFT:
                assert event.id == int(small.logits(np.array(text, dtype=np.int32)).argmax())
            else:
                assert event.id == int(verifier.logits(np.array(text, dtype=np.int32)).argmax())
            text.append(event.id)
    except VerifierLost:
        lost = True
    known.give()
    assert lost is not model  # who only copies has nobody to go on with


def follows(prompt: list[int]) -> HybridDrafter:
    """A small model that says 1 + (last mod 9), beside a context that goes on otherwise behind 4."""
    own = taken(memory("context"), prompt)
    model = FakeDrafter(lambda prefix: 9 * np.eye(20, dtype=np.float32)[1 + int(prefix[-1]) % 9])
    return HybridDrafter(own, model, 3, linked=True)


def test_what_the_small_model_drafts_is_continued_by_a_copy() -> None:
    prompt = np.array([2, 3, 4, 15, 16, 17, 18, 19, 1], dtype=np.int32)
    mixed = follows(prompt.tolist())
    chunk = mixed.propose(GenerationState(prompt), 63)
    assert chunk.ids.tolist()[:7] == [2, 3, 4, 15, 16, 17, 18]
    assert chunk.tail == len(chunk) - 3
    assert not chunk.retrieved
    words = merge(chunk, Verdict(5, np.array([7], dtype=np.int32)))
    assert [word.source for word in words] == [Source.ACCEPTED] * 3 + [Source.RETRIEVED] * 2 + [Source.CORRECTED]
    alone = mixed.unverified(GenerationState(prompt), chunk, 63)
    assert (alone.ids.tolist(), alone.tail) == ([2, 3, 4], 0)


def test_behind_the_end_of_a_turn_nothing_is_copied() -> None:
    known = memory("context")
    prompt = np.array([5, 6, EOG, 7, 8, 5], dtype=np.int32)
    own = taken(known, prompt)
    assert own.propose(GenerationState(prompt), 10).ids.tolist() == [6, EOG]
    known.give()


def test_one_reply_at_a_time_has_it() -> None:
    known = memory()
    assert known.take() is not None
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(known.take()))
    thread.start()
    thread.join()
    assert found == [None]
    known.give()
    assert known.take() is not None
    known.give()


def test_the_past_is_bounded() -> None:
    known = memory("history", "analogy")
    talk = PastConversation(list(range(1, 201)), list(range(1, 201)))
    for at in range(4 * MOST_TOKENS // 400):
        known.add(talk)
        if at % 50 == 0:
            known.take()
            known.give()
        assert known.tokens <= MOST_TOKENS + 51 * 400
    known.take()
    known.give()
    assert MOST_TOKENS // 4 <= known.tokens <= MOST_TOKENS


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0.3, 2.0))
def test_a_sampled_reply_with_copies_is_the_one_that_is_drawn_without(seed: int, temperature: float) -> None:
    verifier, sampling = FakeVerifier(markov(5, 6, sharpness=1.5)), Sampling(temperature, top_k=0, top_p=1.0, seed=seed)
    tokens, stats = reply(memory("context"), [1, 2, 1, 2, 1], verifier, sampling=sampling)
    assert [token.id for token in tokens] == plain([1, 2, 1, 2, 1], verifier, sampling)
    assert stats.drafted > 0


def test_explanations_name_what_was_retrieved() -> None:
    known, verifier = memory(), FakeVerifier(chain(3, eog_at=20))
    reply(known, [1, 2, 3], verifier)
    ids = np.array([1, 2, 3], dtype=np.int32)
    own = taken(known, ids)
    events = generate(
        GenerationState(ids, GREEDY, GenerationLimits(40, 200, 63), explain=True),
        vocabulary=Letters(),
        drafter=own,
        gate=AlwaysGate(),
        verifier=verifier,
        stats=Stats(),
    )
    texts = [event.text for event in events if isinstance(event, Explanation)]
    known.give()
    assert any(text.startswith("retrieved ") and "tokens expected" in text for text in texts)


def test_the_prompts_time_is_not_taken_for_a_decodes() -> None:
    known = memory("context")
    for _ in range(20):  # short replies behind long prompts
        own = taken(known, np.array([1, 2, 3], dtype=np.int32))
        told(
            own,
            own.propose(GenerationState(np.array([1, 2, 3], dtype=np.int32)), 8),
            Verdict(0, NO_IDS[:0], 0.0),
            1000.0,
        )
        before = known.length.rate
        known.give()
    assert known.length.rate == before
    own = taken(known, np.array([1, 2, 3], dtype=np.int32))
    for seconds in (1000.0, 0.1):
        told(own, Chunk(), Verdict(0, np.array([7], dtype=np.int32)), seconds)
    own.end()
    assert known.length.rate > before
    known.give()

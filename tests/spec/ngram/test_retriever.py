"""Copies in the loop, with models made of arithmetic: the text is the verifier's own, whatever is copied."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import VerifierLost
from edgellm.spec.drafters.model import HybridDrafter
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.loop import merge
from edgellm.spec.ngram.retriever import MOST_TOKENS, DraftIndex
from edgellm.spec.ngram.sources import HistoryIndex
from edgellm.spec.params import SOURCES
from edgellm.spec.protocols import Drafter, GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Chunk, Decision, Ids, Round, Source, Token, Verdict
from tests.spec.fakes import EOG, FakeDrafter, FakeVerifier, chain, markov
from tests.spec.running import going
from tests.spec.running import ids as ids_of

CHEAP = CostCurve((1, 64), (1.0, 1.1))


@pytest.fixture(autouse=True)
def _arithmetic_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve is believed, whatever decodes take: those of arithmetic take less time than a lookup."""
    monkeypatch.setattr("edgellm.spec.drafting.cost_curve.WITNESSES", 10**9)


def memory(curve: CostCurve = CHEAP) -> DraftIndex:
    return DraftIndex(DraftPolicy(curve), lambda token: token % 3 == 0, lambda token: token == EOG)


def events(
    known: DraftIndex, prompt: Sequence[int], verifier: FakeVerifier, *, names: Collection[str] = SOURCES,
    model: FakeDrafter | None = None,
) -> tuple[list[Any], Summary]:  # fmt: skip
    """Return the events of a reply, and its statistics; it is remembered."""
    stats, ids = Summary(), np.array(prompt, dtype=np.int32)
    retriever = known.take(names)
    assert retriever is not None
    try:
        state = GenerationState(ids, GREEDY, GenerationLimits(40, 200, 63))
        return list(going(state, HybridDrafter(known.policy, retriever, model, 3), verifier, stats=stats)), stats
    finally:
        known.give()
        known.add(prompt, stats.ids)


def plain(prompt: list[int], verifier: FakeVerifier) -> list[int]:
    state = GenerationState(np.array(prompt, dtype=np.int32), GREEDY, GenerationLimits(40, 200))
    return ids_of(going(state, None, verifier))


@settings(max_examples=40)
@given(
    st.sets(st.sampled_from(sorted(SOURCES)), min_size=1),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(0, 99),
    st.booleans(),
)
def test_copying_never_changes_the_text(names: set[str], prompts: list[list[int]], seed: int, model: bool) -> None:
    known, verifier = memory(), FakeVerifier(markov(seed, 10, sharpness=4.0))
    small = FakeDrafter(verifier.logits) if model else None
    for prompt in prompts:
        assert ids_of(events(known, prompt, verifier, names=sorted(names), model=small)[0]) == plain(prompt, verifier)


def test_what_was_replied_before_is_copied_and_takes_fewer_passes() -> None:
    known, verifier = memory(), FakeVerifier(chain(3, eog_at=30))
    first, before = events(known, [1, 2, 3], verifier, names=["history"])
    again, after = events(known, [1, 2, 3], verifier, names=["history"])
    assert ids_of(first) == ids_of(again)
    assert before.rounds > 3 * after.rounds
    assert Source.RETRIEVED in {token.source for token in again}
    assert after.finish_reason == "stop"


def test_what_repeats_itself_is_copied_from_the_context() -> None:
    loop = FakeVerifier(lambda prefix: np.eye(10, dtype=np.float32)[1 + int(prefix[-1]) % 5] * 9)
    assert events(memory(), [1, 2, 3, 4, 5, 1, 2], loop, names=["context"])[1].accepted > 20


def test_copies_are_found_at_once_after_a_long_time_without_any() -> None:
    known = DraftIndex(DraftPolicy(CostCurve((1, 64), (1e-3, 2e-3))), lambda _token: False, lambda _token: False)
    passage = list(range(5_000, 5_120))
    drafter, text = taken(known, [*passage, 1], ["context"]), [*passage, 1]
    accepted = 0
    for number in range(1500):
        drafter.propose(GenerationState(np.array(text, dtype=np.int32)), 8)
        told(drafter, Chunk(), Verdict(0, np.array([number + 10], dtype=np.int32)), 1e-3)
        text.append(number + 10)
    left = list(passage)
    for _ in range(60):
        chunk = drafter.propose(GenerationState(np.array(text, dtype=np.int32)), 63)
        right = 0
        while right < min(len(chunk), len(left) - 1) and int(chunk.ids[right]) == left[right]:
            right += 1
        told(drafter, chunk, Verdict(right, np.array(left[right : right + 1], dtype=np.int32)), 1e-3)
        text, left, accepted = [*text, *left[: right + 1]], left[right + 1 :], accepted + right
        if not left:
            break
    assert accepted >= 0.8 * len(passage)


def test_what_is_offered_and_not_copied_is_learned_of_too() -> None:
    """A second row costs nearly as much as a first, so at first nothing pays; what would have been right shows."""
    known = memory(CostCurve((1, 2, 64), (1.0, 1.9, 58.0)))
    text, lengths = np.array([1, 2, 3, 4, 5] * 2, dtype=np.int32), []
    drafter = taken(known, text, ["context"])
    for _ in range(40):
        chunk = drafter.propose(GenerationState(text), 1)
        right = 1 + (int(text[-1]) + np.arange(len(chunk) + 1)) % 5
        told(drafter, chunk, Verdict(len(chunk), right[-1:].astype(np.int32)), 1.0 + 0.9 * len(chunk))
        text = np.append(text, right).astype(np.int32)
        lengths.append(len(chunk))
    assert lengths[0] == 0
    assert sum(lengths[20:]) >= 15


def test_where_copying_does_not_pay_nothing_is_copied_and_the_reason_says_so() -> None:
    prompt = np.array([1, 2, 3, 1, 2], dtype=np.int32)
    drafter = taken(memory(CostCurve((1, 2, 64), (1.0, 4.0, 200.0))), prompt)
    chunk = drafter.propose(GenerationState(prompt, explain=True), 10)
    assert len(chunk) == 0
    assert "costs 300%" in chunk.reason


@pytest.mark.parametrize("model", [False, True])
def test_what_is_copied_never_stands_unchecked(model: bool) -> None:
    known = memory()
    events(known, [1, 2, 3], FakeVerifier(chain(3, eog_at=30)))
    verifier = FakeVerifier(chain(3, eog_at=30), lost={1, 3}, absence=2)
    small = FakeDrafter(chain(99))  # disagrees with the verifier, and with all that can be copied
    retriever, text, lost = known.take(SOURCES), [1, 2, 3], False
    assert retriever is not None
    try:
        state = GenerationState(np.array(text, dtype=np.int32), GREEDY, GenerationLimits(40, 200, 5))
        for event in going(state, HybridDrafter(known.policy, retriever, small if model else None, 3), verifier):
            if isinstance(event, Token):
                writer = small if event.source is Source.DRAFT else verifier
                assert event.id == int(writer.logits(np.array(text, dtype=np.int32)).argmax())
                text.append(event.id)
    except VerifierLost:
        lost = True
    assert lost is not model  # who only copies has nobody to go on with


def test_where_nobody_verifies_the_small_model_writes_and_no_copy_stands() -> None:
    prompt = np.array([1, 2, 3, 4, 9], dtype=np.int32)
    mixed = taken(memory(), prompt, model=FakeDrafter(markov(1, 10)))
    assert len(mixed.unverified(GenerationState(prompt), Chunk(), 8)) == 3
    assert not mixed.unverified(GenerationState(prompt), Chunk(prompt, retrieved=True), 8).retrieved


def test_beside_a_small_model_the_better_of_the_two_drafts() -> None:
    known, prompt = memory(), np.array([1, 2, 3, 4, 9], dtype=np.int32)
    small = FakeDrafter(markov(1, 10))
    mixed = taken(known, prompt, ["context"], small)
    assert not mixed.propose(GenerationState(prompt), 63).retrieved  # there is nothing to copy
    for _ in range(8):
        mixed.propose(GenerationState(prompt), 63)
        told(mixed, Chunk(np.ones(3, np.int32), np.ones(3, np.float32)), Verdict(0, np.array([1], np.int32)), 5.0)
    asked = len(small.prefixes)
    copied = mixed.propose(GenerationState(np.array([1, 2, 3, 4, 9, 1, 2], dtype=np.int32)), 63)
    assert copied.retrieved
    assert len(small.prefixes) == asked


def test_what_the_small_model_drafts_is_continued_by_a_copy() -> None:
    """The model says 1 + (last mod 9), and the context goes on otherwise behind 4."""
    prompt = np.array([2, 3, 4, 15, 16, 17, 18, 19, 1], dtype=np.int32)
    model = FakeDrafter(lambda prefix: 9 * np.eye(20, dtype=np.float32)[1 + int(prefix[-1]) % 9])
    mixed = taken(memory(), prompt, ["context"], model)
    chunk = mixed.propose(GenerationState(prompt), 63)
    assert chunk.ids.tolist()[:7] == [2, 3, 4, 15, 16, 17, 18]
    assert chunk.tail == len(chunk) - 3
    assert not chunk.retrieved
    words = merge(chunk, Verdict(5, np.array([7], dtype=np.int32)))
    assert [word.source for word in words] == [Source.ACCEPTED] * 3 + [Source.RETRIEVED] * 2 + [Source.CORRECTED]
    alone = mixed.unverified(GenerationState(prompt), chunk, 63)
    assert (alone.ids.tolist(), alone.tail) == ([2, 3, 4], 0)


def test_the_past_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[int] = []
    monkeypatch.setattr(HistoryIndex, "__init__", lambda _self: indexed.clear())
    monkeypatch.setattr(HistoryIndex, "add", lambda _self, prompt, reply: indexed.append(len(prompt) + len(reply)))
    known = memory()
    for at in range(4 * MOST_TOKENS // 400):
        known.add(list(range(1, 201)), list(range(1, 401)))
        if at % 50 == 0:
            assert known.take(SOURCES) is not None
            known.give()
            assert sum(indexed) <= MOST_TOKENS
    assert known.take(SOURCES) is not None
    assert MOST_TOKENS // 2 <= sum(indexed) <= MOST_TOKENS


def test_what_a_schema_forces_is_offered_until_the_model_divides_it_otherwise() -> None:
    forced = {(1, 2): [5, 6, 7], (1, 2, 5): [6, 7], (1, 2, 5, 9): [8]}
    known = memory()
    retriever = known.take(("schema",), lambda text: forced.get(tuple(text.tolist()), ()))
    assert retriever is not None
    retriever.begin(np.array([1, 2], dtype=np.int32))
    assert list(retriever.offers(lambda _: 0.0, 9).ids) == [5, 6, 7]
    assert retriever.follow(np.array([1, 2, 5], dtype=np.int32)) > 0
    assert list(retriever.offers(lambda _: 0.0, 9).ids) == [6, 7]
    retriever.follow(np.array([1, 2, 5, 9], dtype=np.int32))
    assert list(retriever.offers(lambda _: 0.0, 1).ids) == [8]
    assert retriever.follow(np.array([1, 2, 5, 9, 8], dtype=np.int32)) == 0
    assert not retriever.offers(lambda _: 0.0, 9).ids


def taken(
    memory: DraftIndex, prompt: Ids | list[int], names: Collection[str] = SOURCES, model: Drafter | None = None
) -> HybridDrafter:
    """Return a drafter from the memory's sources of these names and from `model`, for a reply to `prompt`."""
    retriever = memory.take(names)
    assert retriever is not None
    drafter = HybridDrafter(memory.policy, retriever, model, 3, linked=True)
    drafter.begin(GenerationState(np.asarray(prompt, dtype=np.int32)))
    return drafter


def told(drafter: Drafter, chunk: Chunk, verdict: Verdict, seconds: float = 1.0) -> None:
    """The verdict on the last chunk is there, after so long."""
    drafter.observe(GenerationState(), Round(0, chunk, Decision(True, ""), verdict, 0.0, 0.0, seconds))

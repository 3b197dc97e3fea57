"""When the small model drafts, beside copies: what is known of its rounds decides."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.spec.draft_length import EXPLORATION, CostCurve
from edgellm.spec.drafters.hybrid import EPISODE, FIRST_DRAFT, MIN_ROUNDS, DrafterSelector, HybridDrafter
from edgellm.spec.ngram.draft_index import DraftIndex
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Verdict
from tests.spec.fakes import EOG, FakeDrafter, markov
from tests.spec.ngram.rounds import taken, told

CURVE = CostCurve((1, 2, 64), (1.0, 1.1, 8.0))
PROMPT = np.array([1, 2, 3, 4, 9], dtype=np.int32)


class Sure(FakeDrafter):
    """As sure of each token as it is said to be."""

    sure = 0.99

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        chunk = super().propose(state, gamma)
        confidence = np.full(len(chunk), self.sure, dtype=np.float32)
        return Chunk(chunk.ids, confidence, confidence)


def memory() -> DraftIndex:
    return DraftIndex(("context",), CURVE, lambda _token: False, lambda token: token == EOG)


def verdict(accepted: int) -> Verdict:
    return Verdict(accepted, np.array([1], dtype=np.int32))


def test_a_round_with_the_small_model_says_nothing_of_a_decode() -> None:
    known = memory()
    own = taken(known, PROMPT)
    mixed = HybridDrafter(own, Sure(markov(1, 10)), 3, known.rounds)
    for _ in range(60):
        chunk = mixed.propose(GenerationState(PROMPT), 8)
        if len(chunk):
            assert not chunk.retrieved
            told(mixed, chunk, verdict(len(chunk)), 50.0)  # so slow is the model, and not the verifier
        else:
            told(mixed, chunk, verdict(0), CURVE.seconds[0])
    assert not known.length.drifted
    known.give()


def test_as_much_of_a_draft_as_pays_is_sent() -> None:
    dear = DraftIndex(("context",), CostCurve((1, 64), (1.0, 50.0)), lambda _token: False, lambda token: token == EOG)
    own = taken(dear, PROMPT)
    doubting = Sure(markov(1, 10))
    doubting.sure = 0.1
    drafter = HybridDrafter(own, doubting, 6, dear.rounds, linked=True)
    assert len(drafter.propose(GenerationState(PROMPT), 8)) < 3
    dear.rounds.record_length(4, 4, 4)
    drafter = HybridDrafter(own, Sure(markov(1, 10)), 6, dear.rounds, linked=True)
    assert len(drafter.propose(GenerationState(PROMPT), 8)) == 6
    dear.give()


def test_a_prompt_is_read_where_that_pays() -> None:
    rounds = DrafterSelector()
    assert rounds.try_due()
    for _ in range(MIN_ROUNDS):
        rounds.record_other_rounds(1, 1, 1.0)
        rounds.record_draft(0.2, 0)
        rounds.record_model_round(4, 1.2)
    rounds.record_draft(20.2, 100)  # it takes 0.2 a token to read a prompt
    assert not rounds.try_due()
    assert rounds.prompt_pays(20, 0)
    assert not rounds.prompt_pays(200, 0)
    assert not rounds.prompt_pays(20, 38)  # nearly over


@pytest.mark.parametrize(
    ("linked", "prefill", "drafts"),
    [(False, None, False), (True, None, True), (False, 4.0, False), (False, 0.1, True)],
)
def test_the_first_token_does_not_wait_for_a_model_here_that_takes_long_to_read(
    linked: bool, prefill: float | None, drafts: bool
) -> None:
    known, model = memory(), Sure(markov(1, 10))
    if prefill is not None:
        for _ in range(MIN_ROUNDS):
            known.rounds.record_other_rounds(1, 1, 1.0)
            known.rounds.record_draft(0.2, 0)
            known.rounds.record_model_round(4, 1.2)
        known.rounds.record_draft(prefill + 0.2, len(PROMPT))
    mixed = HybridDrafter(taken(known, PROMPT), model, 3, known.rounds, linked=linked)
    state = GenerationState(PROMPT)
    mixed.begin(state)
    chunk = mixed.propose(state, 8)
    assert bool(len(chunk)) == bool(model.prefixes) == drafts
    told(mixed, chunk, verdict(0), 9.0)
    state.append(1)
    assert len(mixed.propose(state, 8)), "it is asked behind the first token"
    known.give()


def first_copy(known: DraftIndex, model: Sure) -> tuple[HybridDrafter, GenerationState, Chunk]:
    """A drafter with `model`, a reply whose prompt offers something to copy, and its first chunk."""
    prompt = np.array([*range(1, 9), *range(1, 6)], dtype=np.int32)
    mixed, state = HybridDrafter(taken(known, prompt), model, 3, known.rounds), GenerationState(prompt)
    mixed.begin(state)
    chunk = mixed.propose(state, 8)
    assert chunk.retrieved
    return mixed, state, chunk


def test_behind_a_first_copy_the_model_reads_the_prompt_while_the_verifier_does() -> None:
    known, model = memory(), Sure(markov(1, 10))
    mixed, state, chunk = first_copy(known, model)
    mixed.look_ahead(state, chunk, 8, lambda: True)
    assert not model.prefixes, "the verdict was there already"
    for _ in range(2):
        mixed.look_ahead(state, chunk, 8, lambda: False)
        assert [len(prefix) for prefix in model.prefixes] == [state.prompt_tokens], "read once"
    told(mixed, chunk, verdict(0), 9.0)
    assert len(mixed.propose(GenerationState(np.append(state.ids, 9)), 8))
    told(mixed, Chunk(), verdict(0), 5.0)
    assert known.rounds.model_round == (1.0, 5.0), "as the prompt is read, this round's time tells what a draft costs"
    known.give()


def test_the_prompt_is_not_read_ahead_where_the_model_would_not_draft() -> None:
    known, model = memory(), Sure(markov(1, 10))
    for _ in range(MIN_ROUNDS):
        known.rounds.record_model_round(1, 90.0)
        known.rounds.record_other_rounds(1, 1, 1.0)
    mixed, state, chunk = first_copy(known, model)
    mixed.look_ahead(state, chunk, 8, lambda: False)
    assert not model.prefixes
    known.give()


def test_what_a_model_takes_to_read_the_first_prompt_is_known_with_its_second_draft() -> None:
    rounds = DrafterSelector()
    rounds.record_draft(20.2, 100)
    for _ in range(MIN_ROUNDS):
        rounds.record_draft(0.2, 0)
        rounds.record_model_round(1, 10.0)
    for _ in range(int(9.6 / EXPLORATION)):
        rounds.record_other_rounds(1, 2, 1.0)
    assert rounds.try_due(0)
    assert not rounds.try_due(100)


def test_drafts_become_longer_while_they_are_right_or_too_short_to_pay() -> None:
    for sent, accepted, longer in ((4, 4, True), (4, 2, True), (4, 1, False), (0, 0, True), (2, 0, False)):
        rounds = DrafterSelector()
        rounds.record_length(FIRST_DRAFT, sent, accepted)
        assert (rounds.longest > FIRST_DRAFT) is longer, (sent, accepted)
    rounds = DrafterSelector()
    rounds.record_length(FIRST_DRAFT - 1, 3, 3)  # the model itself has ended it
    assert rounds.longest == FIRST_DRAFT


def test_after_a_first_draft_that_is_all_wrong_one_token_is_drafted() -> None:
    rounds = DrafterSelector()
    rounds.record_length(FIRST_DRAFT, 2, 0)
    assert rounds.longest == 1
    rounds.record_length(1, 1, 1)
    assert rounds.longest == 2
    rounds = DrafterSelector()
    rounds.record_length(FIRST_DRAFT, 4, 4)
    rounds.record_length(2 * FIRST_DRAFT, 8, 0)  # it has been right before
    assert rounds.longest == 2 * FIRST_DRAFT


def test_a_useless_model_is_tried_with_short_drafts() -> None:
    known = memory()
    mixed = HybridDrafter(taken(known, PROMPT), Sure(markov(1, 10)), 16, known.rounds)
    drafted = 0
    for _ in range(40):
        chunk = mixed.propose(GenerationState(PROMPT), 63)
        drafted += len(chunk)
        told(mixed, chunk, verdict(0), 1.0 + 3.0 * len(chunk))
    assert 0 < drafted <= FIRST_DRAFT + 2 * MIN_ROUNDS  # later one of its own, and a copied one behind it
    known.give()


def test_the_small_model_is_tried_again_in_a_while() -> None:
    rounds = DrafterSelector()
    for _ in range(MIN_ROUNDS):
        rounds.record_model_round(1, 10.0)
    assert not rounds.try_due()
    waited = 0
    while not rounds.try_due():
        rounds.record_other_rounds(1, 2, 1.0)
        waited += 1
    assert 0.9 < waited * EXPLORATION / 9.5 <= 1.1, "a try costs 9.5 seconds, and so much of the time is for that"
    rounds.record_model_round(1, 10.0)
    assert not rounds.try_due()


def test_what_rounds_bring_is_kept_from_reply_to_reply() -> None:
    known = memory()
    slow = Sure(markov(1, 10))
    for number in range(3):
        own = taken(known, PROMPT)
        mixed = HybridDrafter(own, slow, 3, known.rounds)
        for _ in range(MIN_ROUNDS + 2):
            chunk = mixed.propose(GenerationState(PROMPT), 8)
            told(mixed, chunk, verdict(0), 90.0 if len(chunk) else 1.0)
        known.give()
        if not number:
            asked = len(slow.prefixes)
    assert not known.rounds.try_due()
    assert len(slow.prefixes) == asked  # later replies do not ask it: it only makes them slower


def test_a_draft_of_which_nothing_pays_was_a_try() -> None:
    dear = DraftIndex(("context",), CostCurve((1, 64), (1.0, 90.0)), lambda _token: False, lambda token: token == EOG)
    own = taken(dear, PROMPT)
    doubting = Sure(markov(1, 10))
    doubting.sure = 0.05
    mixed = HybridDrafter(own, doubting, 6, dear.rounds)
    for _ in range(20):
        chunk = mixed.propose(GenerationState(PROMPT), 8)
        assert not len(chunk)
        told(mixed, chunk, verdict(0), 9.0 if mixed.asked else 1.0)
    assert not dear.rounds.try_due()
    assert len(doubting.prefixes) < 8  # else every round would be a try
    dear.give()


def test_a_model_whose_drafts_are_all_dropped_is_hardly_asked() -> None:
    """A curve that was measured beside other work: a decode of one row takes a tenth of what it says."""
    wrong = DraftIndex(
        ("context",), CostCurve((1, 2, 64), (10.0, 90.0, 900.0)), lambda _token: False, lambda token: token == EOG
    )
    own = taken(wrong, PROMPT)
    doubting = Sure(markov(1, 10))
    doubting.sure = 0.5
    mixed, asked, reasons = HybridDrafter(own, doubting, 6, wrong.rounds), 0, ""
    state = GenerationState(PROMPT, explain=True)
    for _ in range(60):
        chunk = mixed.propose(state, 8)
        asked += mixed.asked
        reasons += chunk.reason
        assert not len(chunk)
        told(mixed, chunk, verdict(0), 3.0 if mixed.asked else 1.0)
    assert MIN_ROUNDS < asked < 12
    assert "the draft model is paused: its last drafts did not pay" in reasons
    wrong.give()


def test_where_nobody_verifies_the_small_model_writes_though_it_did_not_pay() -> None:
    known = memory()
    own = taken(known, PROMPT)
    mixed = HybridDrafter(own, Sure(markov(1, 10)), 3, known.rounds)
    assert len(mixed.unverified(GenerationState(PROMPT), Chunk(), 8)) == 3
    copied = Chunk(PROMPT, retrieved=True)
    assert not mixed.unverified(GenerationState(PROMPT), copied, 8).retrieved
    known.give()


def test_a_prompt_that_takes_long_to_read_is_read_for_a_try_less_often() -> None:
    rounds = DrafterSelector()
    for _ in range(MIN_ROUNDS):
        rounds.record_draft(0.2, 0)
        rounds.record_model_round(1, 1.2)
        rounds.record_other_rounds(1, 1, 1.0)
    rounds.record_draft(20.2, 100)
    rounds.record_model_round(1, 1.2)
    for _ in range(100):
        rounds.record_other_rounds(1, 1, 1.0)
    assert rounds.try_due(0)
    assert not rounds.try_due(100)
    for _ in range(round(25.0 / EXPLORATION)):
        rounds.record_other_rounds(1, 1, 1.0)
    assert rounds.try_due(100)


def stretches(rounds: DrafterSelector, seconds: tuple[float, float], many: int) -> list[bool]:
    """Whether the small model is asked in each of `many` stretches, which take so long without it and with it."""
    found = []
    for _ in range(many):
        rounds.start_episode()
        found.append(rounds.uses_model)
        rounds.record_tokens(20, seconds[rounds.uses_model])
    return found


def test_the_small_model_is_asked_where_whole_stretches_are_sooner_there_with_it() -> None:
    slower = stretches(DrafterSelector(), (1.0, 2.0), 400)
    assert slower[:2] == [True, False]
    assert 0 < sum(slower[4:]) <= 400 * EXPLORATION  # now and then it is tried again
    assert sum(stretches(DrafterSelector(), (2.0, 1.0), 400)) > 390


def test_when_the_small_model_begins_to_help_it_is_asked_again() -> None:
    rounds = DrafterSelector()
    assert not any(stretches(rounds, (1.0, 1.1), 20)[-4:])
    assert sum(stretches(rounds, (1.0, 0.5), 200)[-40:]) > 35


def test_a_long_reply_has_several_stretches() -> None:
    rounds = DrafterSelector()
    rounds.start_episode()
    for _ in range(4):
        rounds.record_tokens(EPISODE // 4, 1.0)
    assert not rounds.uses_model


def test_a_small_model_that_rests_is_not_asked_and_says_so() -> None:
    known = memory()
    known.rounds.uses_model = False
    known.rounds.start_episode = lambda: None  # type: ignore[method-assign]
    own = taken(known, PROMPT)
    mixed = HybridDrafter(own, Sure(markov(1, 10)), 6, known.rounds)
    chunk = mixed.propose(GenerationState(PROMPT, explain=True), 8)
    assert not len(chunk)
    assert not mixed.asked
    assert "paused" in chunk.reason
    known.give()


def test_while_copies_and_the_model_rest_neither_is_considered_and_all_rounds_count() -> None:
    known = memory()
    known.allowance.lookups.spend(50.0)
    for _ in range(MIN_ROUNDS):
        known.rounds.record_model_round(1, 9.0)
    own = taken(known, PROMPT)
    mixed, considered, propose = HybridDrafter(own, Sure(markov(1, 10)), 3, known.rounds), list[int](), own.propose

    def noted(state: GenerationState, gamma: int, *, alternative: tuple[float, float] | None = None) -> Chunk:
        considered.append(len(state.ids))
        return propose(state, gamma, alternative=alternative)

    own.propose = noted  # type: ignore[method-assign]
    text = PROMPT
    for number in range(60):
        told(mixed, mixed.propose(GenerationState(text), 8), Verdict(0, np.array([20 + number], dtype=np.int32)), 1.0)
        text = np.append(text, np.int32(20 + number)).astype(np.int32)
    assert 60 / 6 <= len(considered) <= 60 / 3
    mixed.end()
    saved, waited = 8.0 / EXPLORATION, 0
    while not known.rounds.try_due():
        known.rounds.record_other_rounds(1, 1, 1.0)
        waited += 1
    assert waited == pytest.approx(saved - 60, rel=0.05)
    chunks = [mixed.propose(GenerationState(text, explain=True), 8) for _ in range(4)]
    assert all(chunk.reason for chunk in chunks), "each round says why"
    known.give()


class Counting(DrafterSelector):
    """Counts how often it is considered whether to ask the model."""

    considered = 0

    def prompt_pays(self, prompt: int, written: int) -> bool:
        self.considered += 1
        return super().prompt_pays(prompt, written)


def test_a_model_that_does_not_pay_is_rarely_considered_and_rounds_without_it_all_count() -> None:
    known, rounds = memory(), Counting()
    mixed = HybridDrafter(taken(known, PROMPT), Sure(markov(1, 10)), 3, rounds)
    other = DrafterSelector()
    for _ in range(MIN_ROUNDS):
        for selector in (rounds, other):
            selector.record_model_round(1, 9.0)
    text = PROMPT
    for number in range(40):
        chunk = mixed.propose(GenerationState(text), 8)
        assert not len(chunk)
        told(mixed, chunk, Verdict(0, np.array([20 + number], dtype=np.int32)), 1.0 + 0.01 * number)
        text = np.append(text, np.int32(20 + number)).astype(np.int32)
        if number:
            other.record_other_rounds(1, 1, 1.0 + 0.01 * number)
    mixed.end()
    assert 3 <= rounds.considered < 10
    assert rounds.prompt_pays(10, 0) == other.prompt_pays(10, 0)
    for selector in (rounds, other):
        waited = 0
        while not selector.try_due():
            selector.record_other_rounds(1, 1, 1.0)
            waited += 1
        assert waited == pytest.approx(8.0 / EXPLORATION - 40, rel=0.05)
    known.give()

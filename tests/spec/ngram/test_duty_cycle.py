"""Lookups where nothing is copied take next to no time, and are made at once where something is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from edgellm.spec.draft_length import CostCurve, DraftLengthController
from edgellm.spec.drafters.allowance import WINDOW, Allowance, Bucket
from edgellm.spec.ngram import drafter as drafter_module
from edgellm.spec.ngram.draft_index import DraftIndex, PastConversation
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.ngram.duty_cycle import LIKELY, DutyCycle
from edgellm.spec.ngram.sources import ContextIndex, HistoryIndex
from edgellm.spec.ngram.suffix_automaton import SuffixAutomaton
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.types import GREEDY, Chunk, Decision, Ids, Round, Verdict
from tests.spec.ngram.rounds import taken

DECODE = 1e-3
CURVE = CostCurve((1, 2, 4, 8, 16, 64), tuple(DECODE * rows for rows in (1.0, 1.2, 1.5, 2.0, 3.0, 6.0)))
DEAR = CostCurve((1, 2, 4, 8, 16, 64), tuple(DECODE * rows for rows in (1.0, 1.4, 1.9, 2.8, 4.6, 16.0)), change=1e-4)
"""Of a device on which a wrong draft costs much."""
TICK = 2e-5
"""Seconds between two looks at the clock: a lookup takes 20 µs of drafting, and 20 µs of learning from it."""


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(drafter_module, "perf_counter", lambda: TICK * next(ticks))


def ids(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, dtype=np.int32)


def words(rng: random.Random, n: int) -> list[int]:
    """Tokens as they come in texts: the frequent ones are very frequent."""
    return [min(4_000, int(rng.paretovariate(0.35))) for _ in range(n)]


def index() -> DraftIndex:
    return DraftIndex(("context", "history"), CURVE, lambda _token: False, lambda _token: False)


def accounted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which what is spent is added, in decodes."""
    spent: list[float] = []
    spend = Bucket.spend

    def noted(self: Bucket, decodes: float) -> None:
        spent.append(decodes)
        spend(self, decodes)

    monkeypatch.setattr(Bucket, "spend", noted)
    return spent


def round_of(chunk: Chunk, verdict: Verdict) -> Round:
    seconds = float(np.interp(1 + len(chunk), CURVE.rows, CURVE.seconds))
    return Round(0, chunk, Decision(True, ""), verdict, 0.0, 0.0, seconds)


def write(drafter: RetrievalDrafter, prompt: Sequence[int], reply: Sequence[int], told: Callable[..., Any]) -> None:
    """Have a verifier write `reply`; `told` is called after each round with its chunk, and what was accepted."""
    state = GenerationState(ids(prompt), GREEDY, GenerationLimits(len(reply), 10_000, 63))
    left = list(reply)
    while left:
        chunk = drafter.propose(state, min(63, len(left)))
        accepted = 0
        while accepted < min(len(chunk), len(left) - 1) and int(chunk.ids[accepted]) == left[accepted]:
            accepted += 1
        drafter.observe(state, round_of(chunk, Verdict(accepted, ids(left[accepted : accepted + 1]))))
        told(chunk, accepted)
        for token in left[: accepted + 1]:
            state.append(token)
        del left[: accepted + 1]


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_is_right_trying_takes_a_hundredth_of_any_stretch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, spent = random.Random(seed), accounted(monkeypatch)
    known, by_token, drafts, past = index(), list[float](), 0, HistoryIndex()
    for _ in range(4):
        prompt, context = words(rng, 200), ContextIndex()
        drafter = taken(known, ids(prompt))
        state = GenerationState(ids(prompt), GREEDY, GenerationLimits(600, 10_000, 63))
        for source in (context, past):
            source.begin(prompt)
        for word in words(rng, 600):
            chunk = drafter.propose(state, 63)
            offered = {context.cursor().offer()[0], past.cursor().offer()[0]}
            token = next(other for other in (word, *words(rng, 9)) if other not in offered)
            drafter.observe(state, round_of(chunk, Verdict(0, ids([token]))))
            state.append(token)
            for source in (context, past):
                source.extend([token])
            by_token.append(sum(spent))
            drafts += len(chunk) > 0
            spent.clear()
        drafter.end()
        known.give()
        known.add(PastConversation(prompt, state.ids[200:].tolist()))
        past.add(prompt, state.ids[200:].tolist())
    worst = max(sum(by_token[first : first + WINDOW]) for first in range(len(by_token) - WINDOW))
    assert 0.0 < worst <= 0.01 * WINDOW
    assert drafts


def test_a_lookup_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = accounted(monkeypatch)
    drafter = taken(index(), ids([1, 2, 3]))
    write(drafter, [1, 2, 3], [50, 60, 70], lambda *_: None)
    assert spent == pytest.approx([2 * TICK / DECODE] * 3, rel=0.05)  # and 0 of them were drafts


def emptied(lookups: float = 0.0) -> Allowance:
    """Return an allowance with so much left for lookups."""
    allowance = Allowance()
    allowance.lookups.spend(allowance.lookups.left - lookups)
    return allowance


def test_the_account_is_kept_from_reply_to_reply_and_earns_by_the_token() -> None:
    allowance = emptied(-0.1)
    duty = DutyCycle(allowance, lambda: DECODE)
    for prompt in ([1, 2, 3], [7, 8, 9]):
        duty.begin(ids(prompt))
        assert not duty.due(ids([*prompt, 50]))
        assert duty.reason
        before = allowance.lookups.left, allowance.drafts.left
        duty.wrote(10, 0.1)
        assert allowance.lookups.left > before[0]
        assert allowance.drafts.left == pytest.approx(before[1] - 0.1, abs=0.03)


def test_a_longer_run_of_known_tokens_may_cost_more() -> None:
    passage = list(range(100, 120))
    for left, needed in ((0.2, 0), (0.1, 1), (-0.15, LIKELY)):
        for run in range(LIKELY + 3):
            duty = DutyCycle(emptied(left), lambda: DECODE)
            duty.begin(ids([*passage, 1, 2, 3, 4]))
            text = [*passage, 1, 2, 3, 4, *passage[: run + 2]]
            assert duty.due(ids(text)) == (run >= needed), (left, run)


def test_what_stands_in_past_conversations_is_known() -> None:
    past = SuffixAutomaton()
    past.extend([10, 11, 12, 13, 14])
    for known in (past, None):
        duty = DutyCycle(emptied(-0.05), lambda: DECODE, known)
        duty.begin(ids([1, 2, 3]))
        assert duty.due(ids([1, 2, 3, 10, 11, 12, 13])) == (known is not None)


def test_an_interrupted_lookup_does_not_stop_all_others() -> None:
    allowance = Allowance()
    duty = DutyCycle(allowance, lambda: DECODE)
    duty.begin(ids([1, 2, 3]))
    assert duty.due(ids([1, 2, 3]))
    duty.looked(5.0)  # the machine did something else meanwhile
    assert allowance.lookups.left > 0.1


def test_what_was_written_is_indexed_where_four_tokens_of_it_come_again() -> None:
    """A tiny model: the index of ten thousand tokens takes as long as thirty of its decodes."""
    text = list(range(1, 10_001))
    duty = DutyCycle(Allowance(), lambda: DECODE)
    duty.begin(ids(text[:10]))
    assert not duty.due(ids(text))
    assert "have not paid" in duty.reason
    assert not duty.due(ids([*text, 500, 501, 502]))
    assert duty.due(ids([*text, 500, 501, 502, 503]))


def test_a_draft_that_was_not_allowed_and_would_have_been_right_is_made_the_next_time() -> None:
    known, passage = index(), [5_000 + number for number in range(60)]
    known.allowance.drafts.spend(50.0)
    drafts = list[int]()
    write(taken(known, ids(passage)), passage, passage, lambda chunk, _accepted: drafts.append(len(chunk)))
    assert not drafts[0]
    assert sum(drafts) > 40
    known.give()


def test_copies_are_found_at_once_after_a_long_time_without_any() -> None:
    rng, known = random.Random(7), index()
    passage = [5_000 + number for number in range(120)]
    prompt, before = [*passage, *words(rng, 50)], words(rng, 1_500)
    drafter, rounds = taken(known, ids(prompt)), list[tuple[int, int]]()
    write(drafter, prompt, [*before, *passage], lambda chunk, accepted: rounds.append((len(chunk), accepted)))
    known.give()
    copied = sum(accepted for _, accepted in rounds[-60:])
    assert copied >= 0.8 * len(passage)
    alone = taken(index(), ids(prompt))
    at_once: list[int] = []
    write(alone, prompt, passage, lambda _chunk, accepted: at_once.append(accepted))
    assert copied >= sum(at_once) - 20


def rounds_of_short_replies(seed: int) -> int:
    """Return the rounds of twenty short replies, half of which is copied from their prompts, in pieces."""
    rng, known, rounds = random.Random(seed), index(), 0
    for _ in range(20):
        prompt, reply = words(rng, 60), list[int]()
        while len(reply) < 30:
            at = rng.randrange(50)
            reply += [*prompt[at : at + rng.randrange(3, 9)], *words(rng, rng.randrange(2, 7))]
        counted = list[int]()
        drafter = taken(known, ids(prompt))
        write(drafter, prompt, reply, lambda chunk, _accepted, counted=counted: counted.append(len(chunk)))
        drafter.end()
        known.give()
        known.add(PastConversation(prompt, reply))
        rounds += len(counted)
    return rounds


def test_short_replies_that_copy_lose_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever luck the first drafts have."""
    monkeypatch.setitem(globals(), "CURVE", DEAR)
    with_account = [rounds_of_short_replies(seed) for seed in range(20)]
    monkeypatch.setattr(DutyCycle, "due", lambda _self, _text: True)
    monkeypatch.setattr(DutyCycle, "allowed", property(lambda _self: inf))
    without = [rounds_of_short_replies(seed) for seed in range(20)]
    assert sum(with_account) < 1.02 * sum(without)
    assert max(one / other for one, other in zip(with_account, without, strict=True)) < 1.05


def test_while_nothing_is_known_three_to_six_tokens_are_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    due, considered, copied = DutyCycle.due, list[int](), list[int]()

    def noted(self: DutyCycle, text: Ids) -> bool:
        considered.append(len(text))
        return due(self, text)

    monkeypatch.setattr(DutyCycle, "due", noted)
    known, passage = index(), list(range(300, 320))
    known.allowance.lookups.spend(50.0)
    write(
        taken(known, ids([*passage, 1])), [*passage, 1], [*range(500, 610), *passage],
        lambda _chunk, accepted: copied.append(accepted),
    )  # fmt: skip
    steps = [later - sooner for sooner, later in pairwise(considered) if later <= 21 + 110]
    assert steps == sorted(steps), "the more, the longer nothing is known"
    assert (steps[0], steps[-1]) == (3, 6)
    assert sum(copied) >= len(passage) - 6, "what is known is found all the same"


def test_a_round_of_another_drafter_gives_credit_only_for_tokens_that_it_brought() -> None:
    for tokens, gives in ((1, False), (2, True)):
        allowance = emptied()
        DutyCycle(allowance, lambda: DECODE).wrote_with_model(tokens, 0.9 * DECODE)  # shorter than usual, by chance
        assert (allowance.lookups.left > 0.0) is gives


def test_a_round_without_a_lookup_says_why() -> None:
    drafter = taken(index(), ids([1, 2, 3]))
    reasons = set()
    text = ids([1, 2, 3])
    for token in range(50, 200):
        chunk = drafter.propose(GenerationState(text, explain=True), 8)
        reasons.add(chunk.reason)
        drafter.observe(GenerationState(), round_of(chunk, Verdict(0, ids([token]))))
        text = np.append(text, np.int32(token)).astype(np.int32)
    assert any(reason.startswith("no lookup: the last three tokens are new") for reason in reasons)
    assert all(reasons)


def test_rounds_without_a_lookup_are_learned_from_together() -> None:
    one, other = DraftLengthController(CURVE), DraftLengthController(CURVE)
    for controller in (one, other):
        controller.learn(3, 4, 2 * DECODE)
    for _ in range(30):
        one.learn(0, 1, 1.1 * DECODE)
    other.learn_plain(30, 33 * DECODE)
    assert other.rate == pytest.approx(one.rate)
    assert other.rounds == one.rounds
    assert other.single > DECODE

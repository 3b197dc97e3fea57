"""How much is drafted, and from what: what gains most is, and trying costs next to nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgellm.spec.drafting.cost_curve import KNOTS, CostCurve
from edgellm.spec.drafting.policy import Bid, DraftPolicy
from edgellm.spec.types import Chunk, Decision, Round, Verdict
from tests.spec.drafting.test_cost_curve import curves

FLAT = CostCurve((1, 64), (1.0, 1.0))
HALF = CostCurve((1, 2, 64), (1.0, 1.5, 32.5))
"""A second row takes half the time of the first."""
ROOM = 63
chances = st.lists(st.floats(0.01, 0.999), min_size=1, max_size=20).map(
    lambda each: list(itertools.accumulate(each, lambda one, other: one * other))
)


def policy(curve: CostCurve, model: str = "") -> DraftPolicy:
    """Return a policy in a reply behind its first round."""
    found = DraftPolicy(curve)
    found.begin(0, model)
    told(found, 0, 1, 1.0)
    return found


def told(
    policy: DraftPolicy, drafted: int, tokens: int, seconds: float, *, copied: bool = True, drafting: float = 0.0,
    passes: Sequence[float] = (),
) -> None:  # fmt: skip
    """Tell of a round in which `tokens` were written, `drafting` seconds of which a model drafted. A verifier across a
    link tells the seconds of its `passes`, each of which but the first wrote a token."""
    ids = np.ones(drafted, dtype=np.int32)
    chunk = Chunk(ids, np.full(drafted, 0.9, np.float32), retrieved=copied and drafted > 0)
    written = len(passes) or 1
    verdict = Verdict(tokens - written, np.ones(written, dtype=np.int32), sum(passes), passes=written)
    if drafting:
        policy.drafted(drafted, drafting)
    policy.observe(Round(0, chunk, Decision(True, ""), verdict, 0.0, drafting, seconds))


@given(curves, chances, st.integers(1, ROOM))
@example(FLAT, [0.5, 0.25, 0.1], 2)
def test_as_much_is_copied_as_brings_most_for_its_time(curve: CostCurve, survives: list[float], room: int) -> None:
    known = policy(curve)
    table, price = curve.table(), known.price
    gains = [1.0 + sum(survives[:n]) - price * table[n + 1] for n in range(min(len(survives), room) + 1)]
    bid = known.bid(survives, room)
    assert gains[bid.copies] == pytest.approx(max(gains))
    assert known.explain(survives, bid, looked=True)


@given(curves, chances, st.integers(0, 20))
def test_what_is_below_a_floor_changes_no_choice(curve: CostCurve, survives: list[float], rows: int) -> None:
    known = policy(curve)
    floors = [known.floor(place) for place in range(rows, ROOM)]
    kept = [
        chance
        for chance, _ in itertools.takewhile(lambda pair: pair[0] >= pair[1], zip(survives, floors, strict=False))
    ]
    if rows:
        assert known.useful(kept, rows) == known.useful(survives, rows)
    elif kept:
        assert known.bid(kept, ROOM) == known.bid(survives, ROOM)


def test_where_a_further_row_costs_more_more_has_to_have_occurred_before() -> None:
    for second, least in ((1.1, 1), (1.8, 2), (3.2, 3)):
        known = policy(CostCurve((1, 2, 64), (1.0, second, 40.0)))
        assert [known.looks(n) for n in range(5)] == [n >= least for n in range(5)]


# ------------------------------------------------------------------------------------------- the draft model

REAL = CostCurve((1, 2, 4, 8, 64), (1.0, 1.75, 2.9, 5.0, 40.0), filled=True)
"""Decodes of a small quantised model: SmolLM2-135M's on two cores."""
CHEAP = CostCurve((1, 2, 4, 8, 64), (1.0, 1.1, 1.3, 1.7, 8.0))


class Pair:
    """A simulated pair in one reply after another: a round costs by `curve`, a drafted token `drafting` decodes, and
    `right` of the drafted tokens are accepted; the model doubts the next one, and drafts none behind it."""

    def __init__(self, curve: CostCurve, drafting: float, right: int) -> None:
        self.known, self.drafting, self.right = DraftPolicy(curve), drafting, right
        self._table, self.drafts = curve.table(), 0
        self.known.meet("model", drafting)

    def reply(self, tokens: int = 100, prompt: int = 0) -> float:
        """Return the seconds of a reply beyond its tokens' decodes."""
        known, written, taken = self.known, 0, 0.0
        known.begin(prompt, "model")
        told(known, 0, 1, 1.0)
        while written < tokens:
            asks = known.bid([], ROOM).asks
            self.drafts += asks > 0
            drafted = min(asks, self.right + 1) if self.right else asks
            new, drafting = min(drafted, self.right) + 1, drafted * self.drafting
            seconds = self._table[1 + drafted] + drafting
            told(known, drafted, new, seconds, copied=False, drafting=drafting)
            written, taken = written + new, taken + seconds
        return taken - written


def test_a_pair_that_even_right_drafts_would_not_repay_is_never_tried() -> None:
    pair = Pair(REAL, 0.3, right=4)
    for _ in range(20):
        pair.reply()
    assert not pair.drafts
    assert "would take at least" in pair.known.slow_model("model")
    assert "left out" in pair.known.reason
    guessed = Pair(replace(REAL, filled=False), 0.3, right=4)
    guessed.reply()
    assert not guessed.known.slow_model("model"), "not by an estimate"


@pytest.mark.parametrize("prompt", [0, 30])
@pytest.mark.parametrize(("curve", "drafting"), [(REAL, 0.02), (HALF, 0.1), (CHEAP, 0.05), (FLAT, 0.02), (FLAT, 0.3)])
def test_a_first_reply_of_100_tokens_loses_three_halves_of_a_percent_at_most(
    curve: CostCurve, drafting: float, prompt: int
) -> None:
    pair = Pair(curve, drafting, right=0)
    assert pair.reply(100, prompt) <= 1.5
    replies = 1
    while not pair.drafts and replies < 40:
        pair.reply(100, prompt)
        replies += 1
    assert pair.drafts, "it may pay, so it is tried"


@pytest.mark.parametrize(("curve", "drafting"), [(HALF, 0.1), (CHEAP, 0.05), (FLAT, 0.3)])
def test_a_pair_that_pays_is_used_from_its_first_right_drafts_on(curve: CostCurve, drafting: float) -> None:
    pair = Pair(curve, drafting, right=4)
    assert sum(pair.reply(60) for _ in range(10)) < -60.0
    assert pair.reply(60) < -10.0
    assert not pair.known.slow_model("model")


def test_a_pair_whose_acceptance_is_known_is_not_tried_but_used_where_that_pays() -> None:
    for shares, used in (((0.8, 0.7, 0.6, 0.5), True), ((0.3, 0.1, 0.03, 0.01), False)):
        known = DraftPolicy(HALF)
        known.meet("model", 0.05, shares)
        known.begin(20, "model")
        told(known, 0, 1, 1.0)
        assert (known.bid([], ROOM).asks > 1) is used


def test_across_a_link_drafts_are_expected_to_pay_until_both_ways_are_measured() -> None:
    link = CostCurve((1, 64), (0.05, 0.1))
    for round_trip, drafting, used in ((0.1, 0.001, True), (0.01, 0.1, False)):
        known, asked = DraftPolicy(link), []
        known.begin(20, "model", linked=True)
        told(known, 0, 1, 0.2)
        for _ in range(40):
            asks = known.bid([], ROOM).asks
            asked.append(asks > 0)
            taken = asks * drafting
            told(known, asks, 3 if asks else 1, round_trip + taken, copied=False, drafting=taken)
        assert asked[0]
        assert all(asked[-20:]) is used
        assert any(asked[-20:]) is used


def test_copies_across_a_link_cost_what_passes_there_do() -> None:
    """Without its draft, a round would have brought as many tokens."""
    cheap = CostCurve(KNOTS, tuple(0.02 * (1.0 + 0.01 * (rows - 1)) for rows in KNOTS))
    known = DraftPolicy(cheap)
    known.begin(20, linked=True)
    assert known.bid([0.5, 0.25, 0.1], ROOM).copies
    for _ in range(8):
        told(known, 0, 8, 20.0 + 8.0, passes=[1.0] * 8)
        told(known, 1, 8, 20.0 + 8.9, passes=[1.9] + [1.0] * 7)
    assert known.cost.single == pytest.approx(1.0, rel=0.1)
    assert known.cost.seconds(1) == pytest.approx(1.9, rel=0.1)
    assert not known.bid([0.5, 0.25, 0.1], ROOM).copies


def rounds_with(known: DraftPolicy, rounds: int, tokens: int, drafting: float) -> int:
    """Write in so many rounds with a model whose drafts take so long and bring `tokens` a round; return its drafts."""
    asked = 0
    for _ in range(rounds):
        bid = known.bid([], ROOM)
        asked += bid.asks > 0
        if bid.asks:
            told(known, bid.asks, tokens, 1.0 + drafting, copied=False, drafting=drafting)
        else:
            told(known, 0, 1, 1.0)
    return asked


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_model_that_does_not_pay_is_hardly_asked_in_this_reply_and_the_next(tokens: int) -> None:
    known = policy(FLAT, "slow")
    assert rounds_with(known, 1000, tokens, drafting=3.0) < 12
    for _ in range(10):
        known.begin(0, "slow")
        told(known, 0, 1, 1.0)
    assert rounds_with(known, 1000, tokens, drafting=3.0) < 8
    assert "paused" in known.reason
    assert "paused" in known.explain([], Bid(), looked=True)
    assert "being tried" in policy(FLAT, "new").explain([], Bid(), looked=True)
    assert "tried again now and then" in known.slow_model("slow")


def test_when_the_model_begins_to_pay_it_is_asked_again() -> None:
    known = policy(FLAT, "slow")
    rounds_with(known, 1000, tokens=1, drafting=1.0)
    rounds_with(known, 20_000, tokens=6, drafting=0.5)
    assert rounds_with(known, 300, tokens=6, drafting=0.5) > 150


def test_drafts_are_short_until_they_are_right() -> None:
    known = policy(FLAT, "model")
    assert known.bid([], ROOM).asks == 4
    for _ in range(2):  # the prompt is read with the first
        told(known, 4, 1, 1.0, copied=False, drafting=0.1)
    assert known.bid([], ROOM).asks == 2
    right = policy(FLAT, "model")
    told(right, 4, 5, 1.0, copied=False, drafting=0.1)
    told(right, 4, 5, 1.0, copied=False, drafting=0.1)
    assert right.bid([], ROOM).asks == 10


def read(seconds: float, **kwargs: bool) -> DraftPolicy:
    """Return a policy behind replies to prompts of 100 tokens, with a model that takes so many seconds to read a token
    and brings four tokens a round."""
    known = DraftPolicy(HALF)
    known.meet("model", 0.05, (0.9, 0.8, 0.7))
    for _ in range(6):
        known.begin(100, "model", **kwargs)
        told(known, 0, 1, 100.0)
        reads = 100 * seconds
        for _ in range(20):
            if known.bid([], ROOM).asks:
                told(known, 4, 4, 1.2 + reads, copied=False, drafting=0.2 + reads)
                reads = 0.0
            else:
                told(known, 0, 1, 1.0)
    return known


@pytest.mark.parametrize(("prompt", "pays"), [(20, True), (20_000, False)])
def test_a_prompt_is_read_where_that_pays(prompt: int, pays: bool) -> None:
    known = read(0.1)
    known.begin(prompt, "model")
    told(known, 0, 1, 100.0)
    assert (known.bid([], ROOM).asks > 0) is pays


@pytest.mark.parametrize("linked", [False, True])
def test_the_first_token_does_not_wait_for_a_model_here(linked: bool) -> None:
    known = read(0.001, linked=linked)
    known.begin(100, "model", linked=linked)
    assert (known.bid([], ROOM).asks > 0) is linked


def test_a_round_in_which_the_prompt_is_read_says_nothing_of_drafts() -> None:
    known = DraftPolicy(FLAT)
    known.begin(50, "model")
    told(known, 0, 1, 1.0)
    for drafting in (50.0, 0.1, 0.1):
        told(known, 4, 4, 1.0 + drafting, copied=False, drafting=drafting)
    assert known.bid([], ROOM).asks

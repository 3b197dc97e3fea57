"""What drafts cost, by a curve that decodes correct, and how often drafted and copied tokens are accepted."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Evidence, EvidenceAcceptance, evidence
from edgellm.spec.drafting.cost_curve import KNOTS, MAX_DRAFT, ROW_TILE, WITNESSES, CostCurve, DecodeCost

curves = st.lists(st.floats(0.0, 3.0), min_size=len(KNOTS) - 1, max_size=len(KNOTS) - 1).map(
    lambda more: CostCurve(KNOTS, tuple(itertools.accumulate([1.0, *more])))
)
STEPS = CostCurve((1, 2, 3, 4, 5, 6, 8, 12), (13.0, 26.0, 35.0, 34.0, 48.0, 56.0, 43.0, 57.0), filled=True)


@given(curves)
def test_the_table_goes_through_what_was_measured_and_never_falls(curve: CostCurve) -> None:
    table = curve.table()
    assert len(table) == MAX_DRAFT + 2
    assert table[0] == 0.0
    for rows, seconds in zip(curve.rows, curve.seconds, strict=True):
        assert table[rows] == pytest.approx(seconds)
    assert all(one <= other + 1e-12 for one, other in itertools.pairwise(table))


def test_a_decode_is_filled_up_to_a_number_of_rows_that_is_faster_or_at_least_known() -> None:
    widths, table = STEPS.widths(), STEPS.table()
    assert widths[:13] == [0, 1, 2, 3, 4, 8, 8, 8, 8, 12, 12, 12, 12]  # 4 saves little of 3
    assert widths[13:] == list(range(13, MAX_DRAFT + 2))
    assert table[5:13] == [43.0] * 4 + [57.0] * 4
    assert table[24] == 2 * 57.0
    assert replace(STEPS, filled=False).widths() == list(range(MAX_DRAFT + 2))


@given(curves)
def test_filling_up_never_takes_longer_than_the_next_number_that_was_measured(curve: CostCurve) -> None:
    filled = replace(curve, filled=True)
    for rows, (width, seconds) in enumerate(zip(filled.widths(), filled.table(), strict=True)):
        assert width >= rows
        assert width in KNOTS or width % ROW_TILE == 0
        later = [took for known, took in zip(curve.rows, curve.seconds, strict=True) if known >= rows]
        assert not rows or seconds <= later[0] + 1e-12


def test_decodes_behind_many_positions_take_longer_and_those_of_many_rows_most() -> None:
    cost = DecodeCost(CostCurve((1, 2, 64), (1.0, 1.9, 120.0), positions=(0.002, 0.001)))
    observed(cost, WITNESSES, 0, 1, 2.0)
    cost.move(1000)
    assert cost.table[1:4] == pytest.approx([2.0 * 3.0, 2.0 * 4.9, 2.0 * (1.9 + 118.1 / 62.0 + 4.0)])
    assert cost.corrected().seconds == pytest.approx((2.0, 3.8, 240.0))


def observed(cost: DecodeCost, rounds: int, drafted: int, tokens: int, seconds: float) -> None:
    """Learn from so many equal decodes."""
    for _ in range(rounds):
        cost.observe(drafted, tokens, seconds)


def test_a_curve_that_is_wrong_is_corrected() -> None:
    cost = DecodeCost(CostCurve((1, 2, 64), (1.0, 1.9, 120.0)))
    observed(cost, 300, 0, 1, 1.5)
    assert cost.corrected().seconds == pytest.approx((1.5, 2.85, 180.0)), "everything takes longer alike"
    cost = DecodeCost(CostCurve((1, 2, 64), (0.5, 0.3, 0.9)))
    observed(cost, 20, 0, 1, 0.01)
    assert cost.single == pytest.approx(0.01, rel=0.01), "also where more rows were measured faster"
    cost = DecodeCost(CostCurve((1, 4, 64), (1.0, 2.0, 60.0)))
    for _ in range(4):
        observed(cost, 1, 0, 1, 1.0)
        observed(cost, 1, 3, 1, 10.0)
    assert cost.corrected().seconds[:2] == pytest.approx((1.0, 10.0)), "one length alone, beside one that is right"


@given(curves, st.floats(3.0, 1e4), st.booleans(), st.integers(0, 20))
def test_a_curve_wildly_off_is_corrected_at_once(curve: CostCurve, factor: float, slower: bool, drafted: int) -> None:
    real, scale = DecodeCost(curve), 1.0 / factor if slower else factor
    cost = DecodeCost(replace(curve, seconds=tuple(scale * each for each in curve.seconds)))
    observed(cost, WITNESSES, drafted, 1, real.seconds(drafted))
    assert cost.corrected().seconds == pytest.approx(curve.seconds, rel=0.01)


# --- acceptance -------------------------------------------------------------------------------------------------------


sure = st.lists(st.floats(0, 1), max_size=8)


def test_it_is_learned() -> None:
    acceptance = ConfidenceAcceptance()
    before = acceptance.survives([0.97, 0.6])
    for _ in range(40):
        acceptance.learn([0.97, 0.6], 1)  # the second one never is
    after = acceptance.survives([0.97, 0.6])
    assert after[0] > 0.95
    assert after[1] < 0.2 < before[1]


@given(confidence=sure, seen=st.lists(st.tuples(sure, st.integers(0, 8)), max_size=5))
def test_rejections_of_a_chunk_are_a_distribution(confidence: list[float], seen: list[tuple[list[float], int]]) -> None:
    acceptance = ConfidenceAcceptance()
    for chunk, accepted in seen:
        acceptance.learn(chunk, min(len(chunk), accepted))
    chances = acceptance.rejection(confidence)
    assert chances.shape == (len(confidence) + 1,)
    assert chances.min() >= 0.0
    assert chances.sum() == pytest.approx(1.0)


evidences = st.builds(
    evidence, agree=st.integers(1, 3), matched=st.integers(0, 40), share=st.floats(0.0, 1.0), inside=st.booleans()
)


@given(evidences, st.lists(st.booleans(), max_size=30))
def test_a_chance_is_a_probability_whatever_was_seen(kind: Evidence, seen: list[bool]) -> None:
    chances = EvidenceAcceptance([0.3, 0.5])
    for accepted in seen:
        chances.learn(kind, accepted)
    assert 0.0 < chances.chance(kind) < 1.0


def test_before_anything_is_seen_longer_matches_and_clearer_ones_are_surer() -> None:
    chances = EvidenceAcceptance([0.3, 0.5])
    shallow, deep = evidence(1, 1, 1.0, False), evidence(1, 6, 1.0, False)
    assert chances.chance(shallow) < chances.chance(deep)
    assert (
        chances.chance(evidence(1, 6, 0.3, False)) < chances.chance(evidence(1, 6, 0.6, False)) < chances.chance(deep)
    )
    assert chances.chance(shallow) < chances.chance(evidence(2, 1, 1.0, False))


def test_what_is_seen_counts_for_its_kind() -> None:
    chances = EvidenceAcceptance([0.5, 0.5])
    kind, other = evidence(1, 3, 1.0, False), evidence(2, 3, 1.0, False)
    before = chances.chance(other)
    for _ in range(50):
        chances.learn(kind, False)
    assert chances.chance(kind) < 0.1
    assert chances.chance(other) == before


def test_it_follows_when_things_change() -> None:
    chances = EvidenceAcceptance([0.5])
    kind = evidence(1, 3, 1.0, False)
    for _ in range(1000):
        chances.learn(kind, True)
    for _ in range(400):
        chances.learn(kind, False)
    assert chances.chance(kind) < 0.45  # and not the 0.75 of all that was ever seen

"""The cost curve and the draft length that it makes best."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import HEADS
from edgellm.spec.draft_length import (
    DEPTH_STEP,
    DRIFT,
    EXPLORATION,
    KNOTS,
    MAX_DRAFT,
    MIN_GAIN,
    ROW_TILE,
    WITNESSES,
    CostCurve,
    DraftLengthController,
)

FLAT = CostCurve((1, 64), (1.0, 1.0))
LINEAR = CostCurve((1, 64), (1.0, 64.0))
chances = st.lists(st.floats(0.01, 0.999), min_size=1, max_size=20).map(
    lambda each: list(itertools.accumulate(each, lambda one, other: one * other))
)
curves = st.lists(st.floats(0.0, 3.0), min_size=len(KNOTS) - 1, max_size=len(KNOTS) - 1).map(
    lambda more: CostCurve(KNOTS, tuple(itertools.accumulate([1.0, *more])))
)
heads = st.lists(st.floats(0.0, 2.0), min_size=len(HEADS) - 1, max_size=len(HEADS) - 1).map(
    lambda more: tuple(itertools.accumulate([0.5, *more]))
)
late = st.builds(lambda curve, heads: replace(curve, heads=heads), curves, heads)


@given(curves)
def test_the_table_goes_through_what_was_measured_and_never_falls(curve: CostCurve) -> None:
    table = curve.table()
    assert len(table) == MAX_DRAFT + 2
    assert table[0] == 0.0
    for rows, seconds in zip(curve.rows, curve.seconds, strict=True):
        assert table[rows] == pytest.approx(seconds)
    assert all(one <= other + 1e-12 for one, other in itertools.pairwise(table))


def test_a_decode_that_was_disturbed_takes_no_longer_than_one_of_more_rows() -> None:
    table = CostCurve((1, 2, 4, 64), (1.0, 0.9, 80.0, 3.0)).table()
    assert table[1:3] == [0.9, 0.9]
    assert table[4] == 3.0
    assert table == sorted(table)


STEPS = CostCurve((1, 2, 3, 4, 5, 6, 8, 12), (13.0, 26.0, 35.0, 34.0, 48.0, 56.0, 43.0, 57.0), filled=True)


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


def test_many_rows_are_filled_up_by_three_at_most() -> None:
    """A prompt's, above all: every row costs, and only the rest of four is computed one by one."""
    widths = replace(LINEAR, rows=KNOTS, seconds=tuple(map(float, KNOTS)), filled=True).widths()
    assert [widths[rows] for rows in (17, 25, 33, 49, 53, 64)] == [20, 28, 36, 52, 56, 64]


def test_rows_that_cost_nothing_are_drafted_and_steps_between_are_not_stopped_at() -> None:
    sure = [0.9**n for n in range(1, 12)]
    assert DraftLengthController(STEPS).choose(sure) in (3, 7, 11)
    rule = DraftLengthController(STEPS)
    for _ in range(60):
        rule.learn(5, 4, 43.0)  # as long as eight rows take
    assert not rule.drifted


HEADS_MS = (5.0, 8.0, 10.0, 13.0, 20.0, 22.0, 45.0, 90.0)
LATE = CostCurve((1, 2, 4, 8, 16), (8.0, 11.5, 12.0, 20.0, 30.0), heads=HEADS_MS)


def test_heads_are_paid_for_what_is_looked_at() -> None:
    at_once = replace(LATE, seconds=(13.0, 19.5, 25.0, 40.0, 52.0), heads=())  # the same, computed for all rows
    likely = [0.45, 0.2, 0.1]
    assert DraftLengthController(at_once).choose(likely) == 0
    assert DraftLengthController(LATE).choose(likely) == 3
    assert DraftLengthController(LATE).explain(likely, 3) == "3 drafted: 1.8 tokens expected in the time of 1.6"
    assert DraftLengthController(LATE).choose([1.0] * 15) == 15
    assert DraftLengthController(LATE).explain([1.0] * 15, 15) == "15 drafted: 16.0 tokens expected in the time of 4.0"


def test_a_decode_whose_heads_were_all_looked_at_has_not_drifted() -> None:
    rule = DraftLengthController(LATE)
    for _ in range(60):
        rule.learn(3, 4, 12.0 + 13.0)
        rule.learn(3, 1, 12.0 + 5.0)
    assert not rule.drifted
    for _ in range(200):
        rule.learn(3, 4, 2.0 * (12.0 + 13.0))
    assert rule.drifted


def test_drafts_never_have_to_be_better_than_a_verifier_that_they_have_slowed_down() -> None:
    rule = DraftLengthController(LINEAR)
    for _ in range(100):
        rule.learn(8, 1, 9.0)
    assert rule.rate == pytest.approx(1.0)


@given(st.one_of(curves, late), chances, st.integers(0, 20))
def test_what_is_below_a_floor_changes_no_choice(curve: CostCurve, survives: list[float], rows: int) -> None:
    rule = DraftLengthController(curve)
    floors = rule.floors(rows)
    assert len(floors) == MAX_DRAFT - rows
    kept = list(itertools.takewhile(lambda pair: pair[0] >= pair[1], zip(survives, floors, strict=False)))
    kept_survives = [chance for chance, _ in kept]
    if rows:
        assert rule.choose_additional(rows, kept_survives) == rule.choose_additional(rows, survives)
    elif kept_survives:
        assert rule.choose(kept_survives) == rule.choose(survives)


def test_a_second_row_that_costs_nothing_is_no_reason_to_explore_for_ever() -> None:
    rule, drafted = DraftLengthController(FLAT), 0
    for _ in range(1000):
        n = rule.choose([MIN_GAIN / 2])
        drafted += n
        rule.learn(n, 1, 1.0)
    assert 0 < drafted <= 1000 * EXPLORATION / MIN_GAIN


@given(curves, chances)
def test_the_length_is_the_one_that_brings_most_for_its_time(curve: CostCurve, survives: list[float]) -> None:
    rule, table = DraftLengthController(curve), curve.table()
    rate = rule.rate
    gains = [1.0 + sum(survives[:n]) - rate * table[n + 1] for n in range(len(survives) + 1)]
    gains[0] += MIN_GAIN
    chosen = rule.choose(survives)
    assert gains[chosen] == pytest.approx(max(gains))
    assert rule.explain(survives, chosen)


def test_where_rows_cost_nothing_everything_is_drafted_and_where_they_cost_all_nothing() -> None:
    assert DraftLengthController(FLAT).choose([0.5, 0.25, 0.1]) == 3
    assert DraftLengthController(LINEAR).choose([0.9, 0.8, 0.7]) == 0
    assert DraftLengthController(FLAT).choose([]) == 0


def test_against_a_small_model_that_does_better_nothing_is_copied() -> None:
    rule = DraftLengthController(CostCurve((1, 2, 64), (1.0, 1.5, 60.0)))
    assert rule.choose([0.8]) == 1
    assert rule.choose([0.8], alternative=(4.0, 1.5)) == 0
    assert rule.choose([0.8], alternative=(1.0, 1.5)) == 1


def test_what_a_token_has_taken_of_late_is_what_another_is_worth() -> None:
    curve = CostCurve((1, 2, 64), (1.0, 1.5, 60.0))
    slow, fast = DraftLengthController(curve), DraftLengthController(curve)
    for _ in range(200):
        fast.learn(1, 2, 1.5)  # each draft was accepted, and its token took 0.75
        slow.learn(0, 1, 1.0)
    assert slow.choose([0.6]) == 1
    assert [fast.choose([0.6]) for _ in range(20)][-1] == 0  # what may be explored is used up by then


def test_exploring_takes_its_share_of_the_time_and_no_more() -> None:
    rule = DraftLengthController(CostCurve((1, 2, 64), (1.0, 1.9, 120.0)))
    extra = explored = 0.0
    rounds = 2_000
    for _ in range(rounds):
        drafted = rule.choose([0.2])
        explored += drafted
        extra += 0.9 * drafted
        rule.learn(drafted, 1, 1.9 if drafted else 1.0)
    assert explored > 0
    assert extra <= EXPLORATION * (rounds + extra)


def test_a_curve_that_is_wrong_is_noticed_and_meanwhile_scaled() -> None:
    rule = DraftLengthController(CostCurve((1, 2, 64), (1.0, 1.9, 120.0)))
    assert not rule.drifted
    for _ in range(300):
        rule.learn(0, 1, 1.0 + 2 * DRIFT)
    assert rule.drifted
    # everything takes longer alike: what pays is what paid before
    assert rule.choose([0.95]) == DraftLengthController(CostCurve((1, 2, 64), (1.5, 2.85, 180.0))).choose([0.95])


def test_lengths_that_take_longer_than_the_curve_says_are_chosen_less() -> None:
    cheap, rule = CostCurve(KNOTS, tuple(1.0 + 0.01 * rows for rows in KNOTS)), DraftLengthController
    sure = [0.9**n for n in range(1, 40)]
    believed, taught = rule(cheap), rule(cheap)
    for _ in range(40):
        taught.learn(0, 1, 1.0)
        taught.learn(15, 8, 16.0)
    assert taught.choose(sure) < believed.choose(sure)
    assert taught.choose(sure) < 8
    assert not believed.drifted
    assert taught.drifted


def test_one_interruption_changes_little() -> None:
    rule = DraftLengthController(LINEAR)
    for _ in range(20):
        rule.learn(0, 1, 1.0)
    rule.learn(0, 1, 1000.0)
    for _ in range(11):
        rule.learn(0, 1, 1.0)
    assert not rule.drifted


def changing() -> DraftLengthController:
    """Four rows cost twice as much as one, and another number of rows than before a half of one."""
    rule = DraftLengthController(CostCurve((1, 4, 64), (1.0, 2.0, 60.0), change=0.5))
    for _ in range(3):
        rule.learn(0, 1, 1.0)
    return rule


def test_another_number_of_rows_has_its_price() -> None:
    doubtful = [0.6, 0.3, 0.1]
    rule = changing()
    assert DraftLengthController(CostCurve((1, 4, 64), (1.0, 2.0, 60.0))).choose(doubtful) > 0
    assert rule.choose(doubtful) == 0  # the last decode had one row
    rule.learn(3, 1, 2.5)
    assert rule.choose(doubtful) > 0  # one row, too, would be a change now


def test_a_decode_is_filled_up_where_that_is_cheaper() -> None:
    rule = changing()
    rule.learn(3, 4, 2.5)
    assert rule.choose([0.95, 0.9]) == 3
    assert rule.choose([]) == 0
    rule.learn(3, 4, 2.0)
    rule.learn(None, 4, 9.0)  # a draft of the small model: nobody knows how many rows
    assert rule.choose([0.95, 0.9]) == 2


def test_a_change_is_not_taken_for_a_slow_device() -> None:
    rule = changing()
    for _ in range(60):
        rule.learn(0, 1, 1.5)
        rule.learn(3, 3, 2.5)
    assert not rule.drifted
    for _ in range(120):
        rule.learn(0, 1, 1.5 * 2)
        rule.learn(3, 3, 2.5 * 2)
    assert rule.drifted


@given(curves, st.floats(3.0, 1e4), st.booleans(), st.integers(0, 20))
def test_a_curve_that_is_wildly_off_is_corrected_at_once(
    curve: CostCurve, factor: float, slower: bool, drafted: int
) -> None:
    real = replace(curve, change=0.1, heads=HEADS_MS)
    rule = DraftLengthController(real.scaled(1.0 / factor if slower else factor))
    first = DraftLengthController(real)
    rows = drafted + 1
    for _ in range(WITNESSES + 1):  # one pays for another number of rows
        seconds = first._table[rows] + first._head_seconds(rows, 1)
        rule.learn(drafted, 1, seconds)
    assert rule.drifted
    corrected = rule.corrected()
    assert corrected.seconds == pytest.approx(real.seconds, rel=0.2)
    assert corrected.heads == pytest.approx(real.heads, rel=0.2)


def test_a_length_that_is_wildly_off_beside_one_that_is_right_is_corrected_alone() -> None:
    rule = DraftLengthController(CostCurve((1, 4, 64), (1.0, 2.0, 60.0)))
    for _ in range(4):
        rule.learn(0, 1, 1.0)
        rule.learn(3, 1, 10.0)
    assert rule.corrected().seconds[:2] == pytest.approx((1.0, 10.0))
    assert rule.drifted


def test_a_curve_that_makes_drafts_look_dear_is_tried_within_200_tokens() -> None:
    wrong = CostCurve((1, 2, 4, 8, 64), (1.0, 4.0, 8.0, 16.0, 128.0), doubtful=True)
    rule, drafted = DraftLengthController(wrong), []
    for _ in range(200):
        n = rule.choose([0.9**n for n in range(1, 8)])
        rule.learn(n, n + 1 if n else 1, 1.0 + 0.1 * n)
        drafted.append(n)
    assert drafted[-1] >= 4
    assert sum(drafted) > 500


DEEP = CostCurve((1, 2, 4, 8, 16), (1.0, 1.1, 1.3, 1.7, 2.5), attention=(1e-4, 1e-3))


def test_behind_a_long_prompt_every_row_takes_longer() -> None:
    assert DEEP.behind(DEPTH_STEP - 1) == DEEP
    expected = [taken + 0.1024 + 1.024 * rows for rows, taken in zip(DEEP.rows, DEEP.seconds, strict=True)]
    assert DEEP.behind(1024).seconds == pytest.approx(expected)
    assert DEEP.behind(1024) == DEEP.behind(1024 + DEPTH_STEP - 1)
    assert DEEP.scaled(2.0).behind(1024).seconds == pytest.approx(DEEP.behind(1024).scaled(2.0).seconds)


def test_drafts_are_shorter_behind_a_long_prompt() -> None:
    rule, survives = DraftLengthController(DEEP), [0.8**n for n in range(1, 16)]
    short = rule.choose(survives)
    rule.begin(8192)
    assert rule.single == pytest.approx(DEEP.behind(8192).seconds[0])
    assert rule.choose(survives) < short
    rule.begin(0)
    assert rule.single == pytest.approx(1.0)
    assert rule.choose(survives) == short


def test_what_is_learned_behind_a_long_prompt_holds_in_front_of_it() -> None:
    """A device that is half as fast as the curve says, and not more so behind a prompt."""
    rule = DraftLengthController(DEEP)
    rule.begin(4096)
    for _ in range(20):
        rule.learn(0, 1, 1.5 * DEEP.behind(4096).seconds[0])
    assert rule.corrected().seconds[0] == pytest.approx(1.5, rel=0.05)
    assert rule.corrected().attention == DEEP.attention
    rule.begin(0)
    assert rule.single == pytest.approx(1.5, rel=0.05)

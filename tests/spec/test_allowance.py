"""What trying may cost is bounded, and what it has saved may be spent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.drafters.allowance import FIRST, FULL, MOST_SAVED, SHARE, WINDOW, Allowance


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 1.0), st.booleans()), max_size=300))
def test_any_stretch_in_which_nothing_is_accepted_costs_a_hundredth_at_most(
    rounds: list[tuple[int, float, bool]],
) -> None:
    allowance = Allowance()
    spent: list[float] = []  # by token
    for tokens, share, likely in rounds:
        most = allowance.limit(likely)
        cost = share * max(0.0, most)
        allowance.spend(cost)
        allowance.earn(tokens)
        spent += [cost] + [0.0] * (tokens - 1)
    for first in range(len(spent)):
        assert sum(spent[first : first + WINDOW]) <= 0.01 * WINDOW


def test_what_is_not_likely_to_pay_makes_no_debt() -> None:
    allowance = Allowance()
    allowance.spend(FIRST)
    assert allowance.limit(likely=False) == pytest.approx(0.0)
    assert allowance.limit(likely=True) == pytest.approx(FULL)
    allowance.earn(10)
    assert allowance.left == pytest.approx(10 * SHARE)
    allowance.earn(10_000)
    assert allowance.left == FULL


def test_what_was_saved_may_be_spent_soon() -> None:
    allowance = Allowance()
    allowance.spend(-5.0)
    assert allowance.left == FIRST + 5.0
    allowance.spend(-100.0)
    assert allowance.left == MOST_SAVED
    allowance.earn(WINDOW)
    assert FULL < allowance.left < 2.0 * FULL

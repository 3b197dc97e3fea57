"""What trying may cost is bounded, and what it has saved may be spent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.drafters.allowance import CREDIT, MOST_SAVED, WINDOW, Allowance, Bucket


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(0, 1)), max_size=300)
)
def test_any_stretch_in_which_nothing_is_right_costs_a_hundredth_at_most(
    rounds: list[tuple[int, float, float, int]],
) -> None:
    allowance = Allowance()
    spent: list[float] = []  # by token
    for tokens, looking, drafting, debts in rounds:
        lookup = looking * max(0.0, allowance.lookups.limit(debts))
        draft = drafting * max(0.0, allowance.draft)
        allowance.spend_lookup(lookup)
        allowance.settle(draft)
        allowance.earn(tokens)
        spent += [lookup + draft] + [0.0] * (tokens - 1)
    for first in range(len(spent)):
        assert sum(spent[first : first + WINDOW]) <= 0.01 * WINDOW


def test_only_what_is_likely_to_pay_makes_debt() -> None:
    bucket = Bucket(0.01, full=1.0, debt=0.5, first=1.0)
    bucket.spend(1.0)
    assert bucket.limit() == 0.0
    assert bucket.limit(1) == 0.5
    bucket.spend(9.0)  # a disturbance
    assert bucket.left == -0.5
    assert bucket.limit(2) == 0.5
    bucket.earn(10)
    assert bucket.left == pytest.approx(-0.4)
    bucket.earn(10_000)
    assert bucket.left == 1.0


def test_a_draft_that_was_right_gives_credit_for_a_while() -> None:
    allowance = Allowance()
    allowance.settle(9.0)
    allowance.settle(-0.1)
    both = (allowance.lookups, allowance.drafts)
    assert [bucket.left for bucket in both] == [CREDIT, CREDIT]
    assert allowance.draft == 0.5 * CREDIT
    allowance.settle(-3.0)
    assert [bucket.left for bucket in both] == [CREDIT + 3.0, CREDIT + 3.0]
    allowance.settle(-100.0)
    assert [bucket.left for bucket in both] == [MOST_SAVED, MOST_SAVED]
    allowance.earn(WINDOW)
    assert all(bucket.full < bucket.left < bucket.full + 1.0 for bucket in both)


def test_a_loss_that_is_beyond_belief_is_not_believed() -> None:
    allowance = Allowance()
    allowance.settle(-3.0)
    allowance.settle(1e9)
    assert allowance.drafts.left > 0.5 * CREDIT


def test_a_few_wrong_drafts_do_not_end_all_of_them() -> None:
    allowance, drafts = Allowance(), 0
    while allowance.draft >= 0.09:
        allowance.settle(allowance.draft)
        drafts += 1
    assert drafts >= 2
    looked_up = allowance.lookups.left
    assert looked_up > 0.0, "and lookups go on"


def test_the_account_of_a_reply_says_what_was_spent_on_what() -> None:
    allowance = Allowance()
    allowance.spend_lookup(40.0)  # also what is not believed
    allowance.settle(2.5)
    allowance.settle(-3.0)
    allowance.settle_model(2, 3.5)
    allowance.settle_model(4, 1.5)
    allowance.settle_model(1, 0.9)  # one token, by chance
    allowance.trust(1.0)  # was not allowed, and saved nothing
    cost = allowance.cost
    assert (cost.lookups, cost.copies, cost.model, cost.saved) == (40.0, 2.5, 1.5, 3.0 + 2.5)
    assert cost.total == 44.0
    left = allowance.drafts.left
    allowance.begin()
    assert allowance.cost.total == allowance.cost.saved == 0.0
    assert allowance.drafts.left == left, "what may be spent is kept from reply to reply"

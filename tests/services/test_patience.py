"""Limits for one verdict."""

from __future__ import annotations

from edgellm.services.client.patience import FIRST_SECONDS, MOST_SECONDS, Patience, Work


def test_a_verdict_is_waited_for_as_long_as_its_work_may_take() -> None:
    patience = Patience(2.0)
    assert FIRST_SECONDS < patience.limit(Work(10, 1)) < patience.limit(Work(1000, 1)) < MOST_SECONDS
    patience.came(Work(10, 1), 0.01)
    assert patience.limit(Work(5, 1)) == 2.0
    assert patience.limit(Work(4000, 1)) > 100.0
    patience.came(Work(10, 2), 4.0)  # slower than the first: no reason to wait for longer
    assert patience.limit(Work(5, 1)) == 2.0
    slow = Patience(2.0)
    slow.came(Work(5, 1), 3.0)
    assert slow.limit(Work(5, 1)) == 15.0


def test_after_a_verdict_that_did_not_come_the_next_one_has_longer_up_to_a_limit() -> None:
    patience = Patience(2.0)
    patience.came(Work(5, 1), 0.01)
    limits = []
    for _ in range(4):
        patience.missed()
        limits.append(patience.limit(Work(5, 1)))
    assert limits == [4.0, 8.0, 8.0, 8.0]
    patience.came(Work(5, 1), 3.0)
    assert patience.limit(Work(5, 1)) == 2.0

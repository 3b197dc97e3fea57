"""How long a verdict is waited for."""

from __future__ import annotations

from edgellm.spec.lost_verifier import FIRST_SECONDS, MAX_SECONDS, VerdictDeadline, VerdictWork


def test_a_verdict_is_waited_for_as_long_as_its_work_may_take() -> None:
    patience = VerdictDeadline(2.0)
    assert FIRST_SECONDS < patience.limit(VerdictWork(10, 1)) < patience.limit(VerdictWork(1000, 1)) < MAX_SECONDS
    patience.record(VerdictWork(10, 1), 0.01)
    assert patience.limit(VerdictWork(5, 1)) == 2.0
    assert patience.limit(VerdictWork(4000, 1)) > 100.0
    patience.record(VerdictWork(10, 2), 4.0)  # slower than the first: no reason to wait for longer
    assert patience.limit(VerdictWork(5, 1)) == 2.0
    slow = VerdictDeadline(2.0)
    slow.record(VerdictWork(5, 1), 3.0)
    assert slow.limit(VerdictWork(5, 1)) == 15.0


def test_after_a_verdict_that_did_not_come_the_next_one_has_longer_up_to_a_limit() -> None:
    patience = VerdictDeadline(2.0)
    patience.record(VerdictWork(5, 1), 0.01)
    limits = []
    for _ in range(4):
        patience.record_miss()
        limits.append(patience.limit(VerdictWork(5, 1)))
    assert limits == [4.0, 8.0, 8.0, 8.0]
    patience.record(VerdictWork(5, 1), 3.0)
    assert patience.limit(VerdictWork(5, 1)) == 2.0

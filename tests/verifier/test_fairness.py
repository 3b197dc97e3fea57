"""Turns between devices, budgets of a pass, and shares of the queue."""

from __future__ import annotations

import pytest

from edgellm.verifier import fairness
from edgellm.verifier.fairness import BURST, EVENTS_PER_SECOND, DeviceTurns, Pacing, PassCost, Queue
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, SchedulerLimits, next_batch
from tests.verifier.wants import Want

LIMITS = SchedulerLimits()


def flood() -> list[Want]:
    return [Want(i, 1, 0, 5, "flood") for i in range(1, 9)]


def sessions(batch: ScheduledBatch[Want] | None) -> list[int]:
    assert batch is not None
    return [piece.request.session for piece in batch.slices]


def test_each_device_has_a_turn_before_any_has_another() -> None:
    turns = DeviceTurns()
    wants = turns.order([*flood(), Want(20, 1, 0, 5, "other")])
    assert [(want.session, want.turn) for want in wants[:4]] == [(1, 0), (20, 0), (2, 1), (3, 2)]
    turns.record_batch(["flood"])
    assert turns.order([*flood(), Want(20, 1, 0, 5, "other")])[0].session == 20


def test_beyond_the_first_turn_a_batch_is_no_heavier_than_its_budget() -> None:
    wants = DeviceTurns().order([*flood(), Want(20, 1, 0, 5, "other")])
    assert sessions(next_batch(wants, LIMITS, 5, budget=12)) == [1, 20, 2, 3]
    assert len(sessions(next_batch(wants, LIMITS, 5))) == 9
    devices = [Want(i, 1, 4, 5, str(i)) for i in range(64)]
    assert len(sessions(next_batch(DeviceTurns().order(devices), LIMITS, 5, budget=12))) == 64


def test_a_long_verification_is_done_in_portions_where_others_ask() -> None:
    for wants, rows in (([], LIMITS.chunk), (flood()[:2], 16)):
        batch = next_batch(DeviceTurns().order([Want(20, 1, 256, 0, "a"), *wants]), LIMITS, 0, budget=12)
        assert batch is not None
        assert (batch.slices[0].tokens, batch.slices[0].outputs) == (1 + rows, 1 + rows)


def test_a_prefill_of_a_later_turn_does_not_go_ahead_of_a_verification() -> None:
    wants = [Want(1, 1, 0, 5, "flood"), Want(20, 1, 4, 5, "other"), Want(2, 300, 0, 5, "flood")]
    batch = next_batch(DeviceTurns().order(wants), LIMITS, 5, budget=12)
    assert batch is not None
    assert batch.kind is BatchKind.VERIFY


def test_the_verifier_is_shared_while_more_than_one_device_has_asked_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fairness, "monotonic", lambda: now)
    turns = DeviceTurns()
    turns.record_request("a")
    assert not turns.several_devices()
    turns.record_request("b")
    assert turns.several_devices()
    now = fairness.RECENT + 1.0
    turns.record_request("a")
    assert not turns.several_devices()


def test_a_pass_may_hold_many_rows_where_each_costs_little() -> None:
    memory_bound, compute_bound = PassCost(), PassCost()
    for rows in (1, 5, 9, 33, 5, 7):
        memory_bound.add(rows, 0.1 + 0.001 * rows)
        compute_bound.add(rows, 0.001 * rows)
    assert compute_bound.budget(LIMITS) <= 10 < 30 < memory_bound.budget(LIMITS)
    assert PassCost().budget(LIMITS) == 10


def test_the_device_that_fills_the_queue_is_told_first() -> None:
    queue = Queue(8)
    for _ in range(8):
        assert not queue.full("flood")
        queue.enter("flood")
    assert queue.full("flood")
    assert not queue.full("other")
    queue.enter("other")
    for _ in range(4):
        assert queue.full("flood")
        queue.leave("flood")
    queue.leave("flood")
    assert not queue.full("flood")


def test_a_device_that_asks_in_vain_too_often_is_not_heard_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(fairness, "monotonic", lambda: now)
    pacing = Pacing()
    assert not any(pacing.delay("flood") for _ in range(BURST - 1))
    delays = [pacing.delay("flood") for _ in range(51)]
    assert delays[-1] == pytest.approx(50 / EVENTS_PER_SECOND)
    assert pacing.delay("other") == 0.0
    now = 60.0
    assert pacing.delay("flood") == 0.0

"""Turns between devices, budgets of a pass, and shares of the queue."""

from __future__ import annotations

import pytest

from edgellm.services.server import fairness
from edgellm.services.server.fairness import BURST, EVENTS_PER_SECOND, Pacing, Queue
from edgellm.verifier import scheduler
from edgellm.verifier.judgement import Job
from edgellm.verifier.scheduler import DeviceTurns, SchedulerLimits, Slice, next_batch
from tests.verifier.wants import want

LIMITS = SchedulerLimits(budget=12)


def flood(n: int = 8) -> list[Job]:
    return [want(i, 1, 0, 5, "flood") for i in range(1, n + 1)]


def shared(wants: list[Job], prefills: int = 5) -> list[Slice]:
    return next_batch(DeviceTurns().order(wants), LIMITS, prefills, turns=True)


def sessions(batch: list[Slice]) -> list[int]:
    return [piece.request.session for piece in batch]


def test_each_device_has_a_turn_before_any_has_another() -> None:
    turns = DeviceTurns()
    wants = turns.order([*flood(), want(20, 1, 0, 5, "other")])
    assert [(one.session, one.turn) for one in wants[:4]] == [(1, 0), (20, 0), (2, 1), (3, 2)]
    turns.record_batch(["flood"])
    assert turns.order([*flood(), want(20, 1, 0, 5, "other")])[0].session == 20


def test_beyond_the_first_turn_a_batch_is_no_heavier_than_its_budget() -> None:
    assert sessions(shared([*flood(), want(20, 1, 0, 5, "other")])) == [1, 20, 2, 3]
    assert len(shared([want(i, 1, 4, 5, str(i)) for i in range(64)])) == 64


def test_a_long_verification_is_done_in_portions_where_others_ask() -> None:
    first = shared([want(20, 1, 256, 0, "a"), *flood(2)], 0)[0]
    assert first.tokens == first.outputs == 1 + LIMITS.chunk


def test_the_first_in_line_decides_between_prefill_and_verification() -> None:
    assert shared([want(1, 1, 0, 5, "flood"), want(20, 1, 4, 5, "other"), want(2, 300, 0, 5, "flood")])[0].outputs
    honest = want(9, 40, 4, arrival=2, device="honest")
    crowd = [want(session, 1, 0, device="flood", turn=session) for session in range(8)]
    first = next_batch([honest, *crowd], SchedulerLimits(), 2, turns=True)
    assert (first[0].outputs, sessions(first)) == (0, [9])
    assert next_batch([crowd[0], honest, *crowd[1:]], SchedulerLimits(), 3, turns=True)[0].outputs


def test_the_verifier_is_shared_while_more_than_one_device_has_asked_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(scheduler, "monotonic", lambda: now)
    turns = DeviceTurns()
    turns.record_request("a")
    assert not turns.several_devices()
    turns.record_request("b")
    assert turns.several_devices()
    now = scheduler.RECENT + 1.0
    turns.record_request("a")
    assert not turns.several_devices()


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

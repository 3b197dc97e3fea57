"""What a coordinator does not take from the word of a stage, and when a stage's clock began."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from edgellm.errors import ProtocolError
from edgellm.mesh import pipeline
from edgellm.mesh.messages import MicroBatch, StageSpec
from edgellm.mesh.pipeline import Deadline, PendingBatches, StageHost, StageRecord
from edgellm.spec.types import GREEDY, Chunk
from tests.verifier.asking import judged

IDS = np.arange(3, dtype=np.int32)
ROWS = np.ones((3, 8), np.float32)


def test_rows_are_passed_on_once_in_order_and_with_the_question_that_was_asked() -> None:
    pending, asked = PendingBatches(3), judged(Chunk(), GREEDY, 3)
    pending.add(MicroBatch(1, 7, 0, IDS, asked))
    lie = MicroBatch(0, 7, 5, ROWS, judged(Chunk(IDS), GREEDY, 9, logits=True))
    passed = pending.forwarded(0, lie)
    assert passed is not None
    assert (passed.session, passed.number, passed.start, passed.request) == (1, 7, 0, asked)
    np.testing.assert_array_equal(passed.data, ROWS)
    assert pending.slowest([7]) == 1
    with pytest.raises(ProtocolError, match="twice"):
        pending.forwarded(0, lie)
    assert pending.forwarded(1, lie) is not None
    with pytest.raises(ProtocolError, match="not sent to that stage"):
        pending.forwarded(2, lie)  # the last stage has none behind it
    with pytest.raises(ProtocolError, match="not sent"):
        pending.forwarded(0, MicroBatch(0, 8, 0, ROWS))
    pending.forget([7])
    assert pending.forwarded(0, lie) is None


@pytest.mark.parametrize(
    "rows",
    [ROWS[:2], np.ones((4, 8), np.float32), IDS, np.full((3, 8), np.nan, np.float32), np.full((3, 8), np.inf, "f4")],
    ids=["fewer", "more", "ids", "nan", "inf"],
)
def test_rows_that_cannot_be_those_of_a_micro_batch_are_not_passed_on(rows: np.ndarray) -> None:
    pending = PendingBatches(2)
    pending.add(MicroBatch(0, 1, 0, IDS))
    with pytest.raises(ProtocolError, match="rows for 3 positions"):
        pending.forwarded(0, MicroBatch(0, 1, 0, rows))


def test_a_question_is_overdue_whatever_the_devices_say() -> None:
    now = [100.0]

    def after(seconds: float, batches: int, loaded: bool, idle: bool) -> bool:
        """Looked at once a second, as hosts do oftener."""
        deadline = Deadline(lambda: now[0])
        for _ in range(int(seconds)):
            now[0] += 1.0
            if deadline.passed(batches, loaded, idle):
                return True
        return False

    for batches, loaded, idle, longest in (
        (9, True, True, pipeline.IDLE_SECONDS), (1, True, False, pipeline.ANSWER_SECONDS),
        (2, True, False, 2 * pipeline.ANSWER_SECONDS), (1, False, True, pipeline.LOAD_SECONDS),
    ):  # fmt: skip
        assert not after(longest, batches, loaded, idle)
        assert after(longest + 2, batches, loaded, idle)


def test_who_stood_still_blames_nobody() -> None:
    now = [0.0]
    deadline = Deadline(lambda: now[0])
    now[0] += 10_000.0
    assert not deadline.passed(1, True, True)
    for _ in range(3):
        now[0] += 1.0
        assert not deadline.passed(1, True, True)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pipeline, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def record(now: list[float]) -> StageRecord:
    assert now
    return StageRecord(cast(StageHost, None), cast(StageSpec, None))


def test_an_answer_tells_from_both_sides(now: list[float], record: StageRecord) -> None:
    now[0] = 104.0
    record.observe(0.1)  # made at 103.0, and 0.9 s on the way
    assert record.began == pytest.approx(103.9)
    now[0] = 106.4
    record.observe(3.2, 106.0)  # asked at 106.0, written at 106.2
    assert record.began == pytest.approx(103.0)


@pytest.mark.parametrize("at", [-1e9, 0.0, 1e9])
def test_a_time_that_cannot_be_moves_it_no_further_than_it_can_be(
    now: list[float], record: StageRecord, at: float
) -> None:
    now[0] = 101.0
    record.observe(at)
    record.observe(at, 100.5)
    assert 100.0 <= record.began <= 101.0

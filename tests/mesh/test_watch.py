"""What a coordinator does not take from the word of a stage."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.errors import ProtocolError
from edgellm.mesh import pipeline
from edgellm.mesh.messages import MicroBatch
from edgellm.mesh.pipeline import Deadline, PendingBatches
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

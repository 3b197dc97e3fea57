"""When another device's clock began, found out by its messages."""

from __future__ import annotations

from typing import cast

import pytest

from edgellm.mesh import pipeline as clocks
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.pipeline import StageHost, StageRecord


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(clocks, "perf_counter", lambda: now[0])
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

"""What the long runs make of their samples."""

from __future__ import annotations

import pytest

from bench.robustness.load import drift


def test_drift_is_from_the_first_tenth_behind_the_warm_up_to_the_last() -> None:
    samples = [{"rss": 100.0 + at, "sessions": 0.0} for at in range(100)]
    found = drift(samples, "rss")
    assert found["growth"] == pytest.approx(found["last"] / found["first"] - 1.0)
    assert found["max"] == 199.0
    assert drift(samples, "sessions")["growth"] == 0.0  # a short run may see none

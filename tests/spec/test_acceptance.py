"""How often tokens of a confidence are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.drafters.acceptance import Acceptance

sure = st.lists(st.floats(0, 1), max_size=8)


def test_it_is_learned() -> None:
    acceptance = Acceptance()
    before = acceptance.survives([0.97, 0.6])
    for _ in range(40):
        acceptance.learn([0.97, 0.6], 1)  # the second one never is
    after = acceptance.survives([0.97, 0.6])
    assert after[0] > 0.95
    assert after[1] < 0.2 < before[1]


@given(confidence=sure, seen=st.lists(st.tuples(sure, st.integers(0, 8)), max_size=5))
def test_where_a_chunk_is_rejected_is_a_distribution(
    confidence: list[float], seen: list[tuple[list[float], int]]
) -> None:
    acceptance = Acceptance()
    for chunk, accepted in seen:
        acceptance.learn(chunk, min(len(chunk), accepted))
    chances = acceptance.rejection(confidence)
    assert chances.shape == (len(confidence) + 1,)
    assert chances.min() >= 0.0
    assert chances.sum() == pytest.approx(1.0)


def test_an_unlikely_token_is_where_it_breaks() -> None:
    assert Acceptance().rejection([0.99, 0.05, 0.99]).argmax() == 1

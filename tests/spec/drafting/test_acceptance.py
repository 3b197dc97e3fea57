"""How often drafted and copied tokens are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Evidence, EvidenceAcceptance, evidence

sure = st.lists(st.floats(0, 1), max_size=8)


def test_it_is_learned() -> None:
    acceptance = ConfidenceAcceptance()
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
    acceptance = ConfidenceAcceptance()
    for chunk, accepted in seen:
        acceptance.learn(chunk, min(len(chunk), accepted))
    chances = acceptance.rejection(confidence)
    assert chances.shape == (len(confidence) + 1,)
    assert chances.min() >= 0.0
    assert chances.sum() == pytest.approx(1.0)


evidences = st.builds(
    evidence,
    agree=st.integers(1, 3),
    differ=st.just(0),
    matched=st.integers(0, 40),
    share=st.floats(0.0, 1.0),
    inside=st.booleans(),
)


@given(evidences, st.lists(st.booleans(), max_size=30))
def test_a_chance_is_a_probability_whatever_was_seen(kind: Evidence, seen: list[bool]) -> None:
    chances = EvidenceAcceptance([0.3, 0.5])
    for accepted in seen:
        chances.learn(kind, accepted)
    assert 0.0 < chances.chance(kind) < 1.0


def test_before_anything_is_seen_longer_matches_and_clearer_ones_are_surer() -> None:
    chances = EvidenceAcceptance([0.3, 0.5])
    shallow, deep = evidence(1, 0, 1, 1.0, False), evidence(1, 0, 6, 1.0, False)
    assert chances.chance(shallow) < chances.chance(deep)
    assert (
        chances.chance(evidence(1, 0, 6, 0.3, False))
        < chances.chance(evidence(1, 0, 6, 0.6, False))
        < chances.chance(deep)
    )
    assert chances.chance(shallow) < chances.chance(evidence(2, 0, 1, 1.0, False))


def test_what_is_seen_counts_for_its_kind_most_and_for_similar_ones_a_little() -> None:
    chances = EvidenceAcceptance([0.5, 0.5])
    kind, similar, other = evidence(1, 0, 3, 1.0, False), evidence(1, 0, 5, 1.0, False), evidence(2, 0, 3, 1.0, False)
    before = chances.chance(similar), chances.chance(other)
    for _ in range(50):
        chances.learn(kind, False)
    assert chances.chance(kind) < 0.1
    assert chances.chance(kind) < chances.chance(similar) < before[0]
    assert chances.chance(other) == before[1]


def test_it_follows_when_things_change() -> None:
    chances = EvidenceAcceptance([0.5])
    kind = evidence(1, 0, 3, 1.0, False)
    for _ in range(1000):
        chances.learn(kind, True)
    for _ in range(400):
        chances.learn(kind, False)
    assert chances.chance(kind) < 0.45  # and not the 0.75 of all that was ever seen

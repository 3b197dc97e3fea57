"""Guesses at the verdict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgellm.engine import top2
from edgellm.spec.drafters.verdict_prediction import (
    CONTEXT_BOOST,
    alternatives,
    likely_corrections,
    predict_verdicts,
    rejection,
)
from edgellm.spec.types import NO_FLOATS, Chunk


def test_the_papers_distribution_with_nothing_rejected_as_an_outcome() -> None:
    confidence = np.array([0.9, 0.5], dtype=np.float32)
    weights = [0.2 * 0.1, 0.2 * 0.8 * 0.5, 0.8**2]
    assert rejection(confidence, 0.8) == pytest.approx(np.array(weights) / sum(weights), rel=1e-5)


@given(confidence=arrays(np.float32, st.integers(0, 8), elements=st.floats(0, 1, width=32)), alpha=st.floats(0, 1))
def test_it_is_a_distribution(confidence: np.ndarray, alpha: float) -> None:
    chances = rejection(confidence, alpha)
    assert chances.shape == (len(confidence) + 1,)
    assert chances.min() >= 0.0
    assert chances.sum() == pytest.approx(1.0)


def test_an_unsure_token_is_where_it_breaks() -> None:
    assert rejection(np.array([0.99, 0.2, 0.99, 0.99], dtype=np.float32), 0.7)[:4].argmax() == 1


def test_the_likeliest_verdicts_come_first() -> None:
    def some(ids: list[int], probs: list[float]) -> tuple[np.ndarray, np.ndarray]:
        return np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32)

    sure = np.array([0.6], dtype=np.float32)
    found = predict_verdicts(
        np.array([0.3, 0.7]), sure, [some([5, 6], [0.3, 0.1]), some([8, 9, 3], [0.5, 0.3, 0.2])], limit=3
    )
    assert [(guess.accepted, guess.token) for guess in found] == [(1, 8), (0, 5), (1, 9)]
    assert [guess.probability for guess in found] == pytest.approx([0.35, 0.225, 0.21])
    rare = predict_verdicts(np.array([1.0, 0.0]), sure, [some([5], [0.1]), some([8], [1.0])], limit=1)
    assert rare[0].probability == pytest.approx(0.25)  # it is one of many that it may be
    assert predict_verdicts(np.array([1.0, 0.0]), sure, [some([], []), some([], [])], limit=2) == []


@given(
    logits=arrays(np.float32, 12, elements=st.floats(-9, 9, width=16), unique=True),
    known=st.sets(st.integers(0, 11)),
    limit=st.integers(0, 14),
)
def test_tokens_of_the_text_are_so_much_likelier(logits: np.ndarray, known: set[int], limit: int) -> None:
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    weights = {token: (CONTEXT_BOOST if token in known else 1.0) * float(chances[token]) for token in range(12)}
    ids, found = likely_corrections(logits, top2(logits).p1, limit, np.array(sorted(known), dtype=np.int32))
    assert len(ids) == len(found) == min(limit, 12)
    assert found == pytest.approx([weights[token] for token in ids.tolist()], rel=1e-4)
    assert found == pytest.approx(sorted(weights.values(), reverse=True)[:limit], rel=1e-4)
    assert len(set(ids.tolist())) == len(ids)


def test_alternatives_are_other_tokens_than_the_drafted_one() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.01, 0.29], dtype=np.float32))
    chunk = Chunk(
        ids=np.array([0, 3, 7], dtype=np.int32), confidence=np.array([0.5, 0.5, 0.9], dtype=np.float32),
        logits=(logits, logits, NO_FLOATS),
    )  # fmt: skip
    known = np.array([2, 9], dtype=np.int32)  # the draft model may have fewer tokens than the text
    (ids, weights), (others, _), (none, nothing) = alternatives(chunk, 2, known)
    assert ids.tolist() == [2, 3]
    assert weights == pytest.approx([0.01 * CONTEXT_BOOST, 0.29], rel=1e-5)
    assert others.tolist() == [0, 2]
    assert len(none) == len(nothing) == 0
    assert alternatives(Chunk(), 2, known) == []

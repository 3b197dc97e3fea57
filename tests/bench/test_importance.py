"""The signals that are compared with importance."""

from __future__ import annotations

import numpy as np

from bench.synera.importance import entropy, prompt_share, without_sink


def attention(layers: int, heads: int, queries: int, first: int, seed: int = 0) -> np.ndarray:
    """Return rows that sum to 1, in which query q sees the keys up to `first + q`."""
    rows = np.random.default_rng(seed).random((layers, heads, queries, first + queries), dtype=np.float32)
    rows *= np.tri(queries, first + queries, first, dtype=np.float32)
    return rows / rows.sum(axis=-1, keepdims=True)


def test_the_prompts_share_by_hand() -> None:
    rows = np.array([[[[0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0]], [[0.75, 0.25, 0, 0], [0.5, 0.5, 0.0, 0]]]], np.float32)
    np.testing.assert_allclose(prompt_share(rows, 1), [0.625, 0.375])
    np.testing.assert_allclose(prompt_share(rows, 4), [1, 1])


def test_without_the_sink_rows_sum_to_one_again() -> None:
    rows = attention(2, 2, 4, 3)
    rest = without_sink(rows)
    assert not rest[..., 0].any()
    np.testing.assert_allclose(rest.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(rest[..., 2] / rest[..., 1], rows[..., 2] / rows[..., 1], rtol=1e-5)
    assert rows[..., 0].all()  # the rows themselves stay
    only = np.zeros((1, 1, 1, 4), np.float32)
    only[..., 0] = 1
    assert not without_sink(only).any()


def test_entropy() -> None:
    rows = np.array([[[[1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]]]], np.float32)
    np.testing.assert_allclose(entropy(rows), [0, np.log(4), np.log(2)], atol=1e-6)

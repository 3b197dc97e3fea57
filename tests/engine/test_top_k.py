"""Facts of a row of logits, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgellm.engine import Floats, top2, top2_of_rows, top_k
from edgellm.errors import EngineFailed


def softmax(row: Floats) -> np.ndarray:
    wide = np.exp(row.astype(np.float64) - row.max())
    return wide / wide.sum()


def rows(least: int = 1, most: int = 40) -> st.SearchStrategy[Floats]:
    number = st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1.0, float("-inf")])
    return (
        st.lists(number, min_size=least, max_size=most)
        .filter(lambda values: max(values) > float("-inf"))
        .map(lambda values: np.array(values, dtype=np.float32))
    )


@given(rows(least=2))
def test_top2_is_the_definition(row: Floats) -> None:
    order = np.argsort(-row, kind="stable")
    probs = softmax(row)
    facts = top2(row)
    assert facts.id == order[0]
    assert facts.p1 == pytest.approx(probs[order[0]], rel=1e-4)
    assert facts.p2 == pytest.approx(probs[order[1]], rel=1e-4, abs=1e-30)


@given(st.integers(1, 5).flatmap(lambda n: arrays(np.float32, (4, 40 * n), elements=st.floats(-30, 30, width=32))))
def test_top2_of_rows_is_that_of_each_row(table: Floats) -> None:
    assert top2_of_rows(list(table)) == [top2(row) for row in table]
    assert top2_of_rows([]) == []


def test_of_a_large_vocabulary_too() -> None:
    table = np.random.default_rng(0).normal(size=(3, 20_000)).astype(np.float32)
    assert top2_of_rows(list(table)) == [top2(row) for row in table]


def test_a_damaged_row_among_others_is_told() -> None:
    table = np.zeros((3, 8), dtype=np.float32)
    table[1, 2] = np.nan
    with pytest.raises(EngineFailed, match="largest logit is nan"):
        top2_of_rows(list(table))


@given(rows(), st.integers(0, 50))
def test_top_k_is_the_definition(row: Floats, k: int) -> None:
    order = np.argsort(-row, kind="stable")[:k]
    ids = top_k(row, k)
    assert ids.tolist() == order.tolist()
    assert ids.dtype == np.int32


@pytest.mark.parametrize("n", [1_023, 1_024, 1_025, 5_000, 40_000])
@pytest.mark.parametrize("k", [1, 3, 40, 1_000, 2_000])
def test_top_k_of_large_vocabularies(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    row = (rng.standard_normal(n) * 3).round(1).astype(np.float32)  # rounded: many equals
    order = np.argsort(-row, kind="stable")[:k]
    assert top_k(row, k).tolist() == order.tolist()


def test_top2_of_a_large_vocabulary_sums_over_all_of_it() -> None:
    row = np.zeros(150_001, dtype=np.float32)
    row[150_000] = 1.0
    facts = top2(row)
    assert facts.id == 150_000
    assert facts.p1 == pytest.approx(np.e / (150_000 + np.e), rel=1e-5)
    assert facts.p2 == pytest.approx(1 / (150_000 + np.e), rel=1e-5)


def test_a_row_may_come_as_a_matrix() -> None:
    row = np.array([[0.0, 2.0, 1.0]], dtype=np.float32)
    assert top2(row).id == 1
    assert top_k(row, 2).tolist() == [1, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_are_an_error(bad: float) -> None:
    row = np.full(8, bad, dtype=np.float32)
    with pytest.raises(EngineFailed, match="largest logit"):
        top2(row)
    with pytest.raises(EngineFailed, match="largest logit"):
        top_k(row, 3)

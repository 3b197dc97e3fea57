"""Trees find what logistic regression cannot, and are not preferred where they know nothing better."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.spec.gates.fitting import (
    MIN_FOR_TREES,
    Rejection,
    fit,
    fit_rejection,
    grow,
    log_loss,
    log_odds,
    training_data,
)
from edgellm.spec.gates.offload_policy import NAMES, Linear, Trees, as_fields, from_fields, sigmoid
from edgellm.spec.gates.profiler import ObservedChunk, Run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4000, 6))
EITHER = ((X[:, 0] > 0) ^ (X[:, 1] > 0.5)).astype(np.float64)  # no straight law tells it


def test_they_find_what_no_straight_law_can() -> None:
    seen, new = slice(0, 3000), slice(3000, None)
    straight, trees = fit(X[seen], EITHER[seen]), grow(X[seen], EITHER[seen])
    assert log_loss(straight.scores(X[new]), EITHER[new]) > 0.6
    assert log_loss(trees.scores(X[new]), EITHER[new]) < 0.1


def test_one_at_a_time_they_say_the_same() -> None:
    trees = grow(X, EITHER, rounds=20)
    assert [trees.score(x) for x in X[:50]] == pytest.approx(trees.scores(X[:50]).tolist())
    stages = trees.stages(X)
    assert stages.shape == (21, len(X))
    assert np.allclose(stages[7], grow(X, EITHER, rounds=7).scores(X))
    assert np.ptp(stages[0]) == 0.0


def test_each_tree_is_a_step_down() -> None:
    losses = log_loss(grow(X, EITHER, rounds=40).stages(X), EITHER)
    assert (np.diff(losses) < 0).all()


def test_a_value_on_an_edge_is_where_it_was_when_they_grew() -> None:
    """Signals such as counts have few values; an edge that was rounded onto one would move half of all chunks."""
    x = RNG.integers(0, 4, size=(3000, 2)) / 3.0
    truth = (x[:, 0] >= 2 / 3).astype(np.float64)
    trees = grow(x, truth, rounds=80)
    assert ((trees.scores(x) > 0.5) == (truth > 0.5)).all()
    assert not set(np.ravel(trees.edges)) & set(np.unique(x))


@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_one_kind_alone_and_dead_signals_do_no_harm(truth: float) -> None:
    trees = grow(np.full((60, 2), 3.0), np.full(60, truth), rounds=5)
    assert trees.scores(np.array([[3.0, 3.0], [4.0, -1.0]])) == pytest.approx(truth, abs=0.01)


def test_no_tree_at_all_says_the_share() -> None:
    trees = grow(X, EITHER, rounds=0)
    assert trees.score(X[0]) == pytest.approx(EITHER.mean())
    assert trees.scores(X[:3]) == pytest.approx(EITHER.mean())


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_they_come_back_from_json(seed: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    trees = grow(rng.normal(size=(40, 3)), rng.integers(0, 2, 40).astype(np.float64), rounds)
    assert from_fields(json.loads(json.dumps(as_fields(trees))), 3) == trees
    line = Linear((0.5, -1.0), 0.25)
    assert from_fields(json.loads(json.dumps(as_fields(line))), 2) == line


def test_other_shapes_are_refused() -> None:
    good = as_fields(grow(X[:100], EITHER[:100], rounds=2))
    for name in ("places", "edges", "leaves"):
        with pytest.raises(ValueError, match="reshape"):
            from_fields(good | {name: [row[:-1] for row in good[name]]})
    with pytest.raises(KeyError):
        from_fields({"bias": 0.0})
    with pytest.raises(ValueError, match="a feature beyond the 1 "):
        from_fields(good, 1)
    with pytest.raises(ValueError, match="has 2 weights for 3 features"):
        from_fields({"bias": 0.0, "weights": [1.0, 2.0]}, 3)


def test_a_law_far_out_does_not_overflow() -> None:
    assert sigmoid(-1e6) == 0.0
    assert sigmoid(1e6) == 1.0
    assert sigmoid(log_odds(0.3)) == pytest.approx(0.3)


def runs(chunks: int, told: bool) -> list[Run]:
    """Replies of ten chunks; whether one is rejected follows from two signals together, or from nothing."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(chunks // 10):
        signals = rng.normal(size=(10, len(NAMES)))
        wrong = (signals[:, 0] > 0) ^ (signals[:, 1] > 0) if told else rng.random(10) < 0.2
        seen = tuple(
            ObservedChunk(row, 0.5, 0.0, 0 if bad else 2, 2) for row, bad in zip(signals, wrong.tolist(), strict=True)
        )
        found.append(Run(seen, seen, (0.5,), (0.1,), (0.1,)))
    return found


def test_trees_are_taken_where_they_foretell_better() -> None:
    found = fit_rejection(runs(MIN_FOR_TREES, told=True))
    assert isinstance(found.predictor, Trees)
    assert found.losses["trees"] < 0.5 * found.losses["linear"]
    assert len(found.unseen) == MIN_FOR_TREES


NOISE = runs(1000, told=False)


@pytest.fixture(scope="module")
def of_noise() -> Rejection:
    return fit_rejection(NOISE)


def test_where_there_is_nothing_to_find_little_is_said(of_noise: Rejection) -> None:
    found = of_noise
    assert abs(found.losses["linear"] - found.losses["trees"]) < 0.02
    assert np.ptp(found.unseen) < 0.3


def test_what_is_said_of_unseen_replies_was_said_unseen(of_noise: Rejection) -> None:
    """A predictor that learned noise by heart would call it certain."""
    x, wrong = training_data(NOISE)
    assert log_loss(grow(x, wrong).scores(x), wrong) < 0.3
    assert log_loss(of_noise.unseen, wrong) > 0.45


def test_few_chunks_are_judged_by_a_straight_law() -> None:
    assert isinstance(fit_rejection(runs(MIN_FOR_TREES - 10, told=True)).predictor, Linear)
    assert fit_rejection(runs(30, told=True)).losses == {}

"""The budget: what is asked for is what is spent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.spec.gates.fitted import Threshold
from edgellm.spec.gates.profile import solve
from edgellm.spec.gates.rules import HORIZON, BudgetController


def spend(profiled: np.ndarray, scores: np.ndarray, budget: float) -> list[bool]:
    threshold = Threshold(profiled, budget, BudgetController())
    ties = np.random.default_rng(7).random(len(scores))
    return [threshold.decide(float(score), float(tie))[0] for score, tie in zip(scores, ties, strict=True)]


@given(budget=st.floats(0.05, 0.95), seed=st.integers(0, 99), drift=st.floats(-1, 1))
@settings(max_examples=40)
def test_the_share_spent_is_the_budget_even_where_scores_drift(budget: float, seed: int, drift: float) -> None:
    rng = np.random.default_rng(seed)
    taken = spend(rng.normal(size=200), rng.normal(size=1500) + drift, budget)
    assert np.mean(taken) == pytest.approx(budget, abs=0.03)


def test_the_best_chunks_are_the_ones_taken() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=2000)
    taken = np.array(spend(rng.normal(size=500), scores, 0.2))
    best = scores >= np.quantile(scores, 0.8)
    assert (taken & best).sum() / best.sum() > 0.85


def test_equal_scores_are_shared_out() -> None:
    taken = spend(np.zeros(50), np.zeros(1000), 0.3)
    assert np.mean(taken) == pytest.approx(0.3, abs=0.02)


def test_nothing_and_everything_are_exact() -> None:
    rng = np.random.default_rng(2)
    assert not any(spend(rng.normal(size=20), rng.normal(size=300) + 9, 0.0))
    assert all(spend(rng.normal(size=20), rng.normal(size=300) - 9, 1.0))


def test_what_is_owed_is_paid_back() -> None:
    controller = BudgetController(decided=100, offloaded=10)
    assert controller.share == 0.1
    assert controller.target_share(0.2) == pytest.approx(0.2 + 10 / HORIZON)
    assert BudgetController(100, 90).target_share(0.2) == 0.0
    assert BudgetController(100, 0).target_share(0.9) == 1.0


def test_a_falling_share_is_solved_for() -> None:
    assert solve(lambda x: 1.0 - x, 0.25, 0.0, 1.0) == pytest.approx(0.75)
    assert solve(lambda _: 0.1, 0.25, 0.0, 1.0) == 0.0
    assert solve(lambda _: 0.9, 0.25, 0.0, 1.0) == 1.0

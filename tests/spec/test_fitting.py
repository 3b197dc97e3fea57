"""The predictor finds what decides, and its scores are shares."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.spec.gates.fitting import auc, fit


def test_it_finds_the_law() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3)) * (1.0, 5.0, 0.1) + (0.0, 3.0, 1.0)
    chance = 1.0 / (1.0 + np.exp(-(1.5 * x[:, 0] - 0.2 * x[:, 1])))
    found = fit(x, (rng.random(4000) < chance).astype(float), penalty=0.1)
    assert found.weights[0] == pytest.approx(1.5, abs=0.15)
    assert found.weights[1] == pytest.approx(-0.2, abs=0.03)
    assert np.abs(found.scores(x) - chance).mean() < 0.02
    assert found.score(x[7]) == pytest.approx(found.scores(x)[7])


def test_shares_are_predicted_as_shares() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 2))
    worth = np.where(x[:, 0] > 0, 0.4, 0.1)
    scores = fit(x, worth).scores(x)
    assert scores.mean() == pytest.approx(0.25, abs=0.01)
    assert scores[x[:, 0] > 1].mean() > 0.35


@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_one_kind_alone_and_dead_signals_do_no_harm(worth: float) -> None:
    x = np.column_stack((np.full(50, 3.0), np.arange(50.0)))
    found = fit(x, np.full(50, worth))
    assert np.isfinite(found.scores(x)).all()
    assert found.weights[0] == 0.0
    assert found.scores(x).mean() == pytest.approx(worth, abs=0.01)


def test_auc() -> None:
    truth = np.array([True, True, False, False])
    assert auc(np.array([4.0, 3.0, 2.0, 1.0]), truth) == 1.0
    assert auc(np.array([1.0, 2.0, 3.0, 4.0]), truth) == 0.0
    assert auc(np.zeros(4), truth) == 0.5
    assert auc(np.array([2.0, 1.0, 1.0, 0.0]), truth) == 0.875
    assert np.isnan(auc(np.zeros(2), np.array([True, True])))

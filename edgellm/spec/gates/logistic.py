"""Small predictors of a chunk's verdict from its cheap signals; here the linear one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
_FAR = 700.0  # where exp would overflow


class Predictor(Protocol):
    """A predictor that was fitted in profiling, and judges every chunk at run time."""

    def score(self, x: Vector) -> float:
        """Return the score in (0, 1) for signals (f,)."""

    def scores(self, x: Matrix) -> Vector:
        """Return the scores (n,) for signals (n, f)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`score(x) = sigmoid(bias + weights . x)`; the standardisation used in fitting is folded into the weights."""

    weights: tuple[float, ...]
    bias: float

    def score(self, x: Vector) -> float:
        """Return the score in (0, 1) for signals (f,)."""
        return sigmoid(self.bias + float(np.dot(self.weights, x)))

    def scores(self, x: Matrix) -> Vector:
        """Return the scores (n,) for signals (n, f)."""
        scores: Vector = 1.0 / (1.0 + np.exp(-(self.bias + x @ np.array(self.weights))))
        return scores


def fit(x: Matrix, worth: Vector, penalty: float = 1.0) -> Linear:
    """Fit a logistic regression of `worth` (n,) in [0, 1] on signals `x` (n, f), by Newton's method.

    A worth between 0 and 1 counts as that share of a success, so that the prediction is the expected worth.
    `penalty` is the weight of the squared (standardised) coefficients: it decides where the signals do not.
    """
    n, f = x.shape
    centre, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, np.inf)  # a signal that never moves says nothing
    design = np.column_stack((np.ones(n), (x - centre) / scale))
    ridge = np.diag([1e-6, *[penalty] * f])
    beta = np.zeros(f + 1)
    beta[0] = log_odds(float(worth.mean()))
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (worth - p) - ridge @ beta
        hessian = (design * (p * (1.0 - p))[:, None]).T @ design + ridge
        step = np.linalg.solve(hessian, gradient)
        beta += step / max(1.0, float(np.abs(step).max()) / 4.0)  # never more than 4 at a time
        if float(np.abs(step).max()) < 1e-8:
            break
    weights = beta[1:] / scale
    return Linear(tuple(weights.tolist()), float(beta[0] - weights @ np.where(np.isfinite(scale), centre, 0.0)))


def sigmoid(x: float) -> float:
    """Return the sigmoid of one number, without an array."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -_FAR else 0.0


def log_odds(share: float) -> float:
    """Return the inverse of `sigmoid`, of a share that may be 0 or 1."""
    share = min(max(share, 1e-6), 1.0 - 1e-6)
    return math.log(share / (1.0 - share))


def log_loss(scores: Matrix, truth: Vector) -> Vector:
    """Return the log loss of `scores` (..., n) for `truth` (n,), each 0 or 1: the mean of minus the log of the
    probability given to the truth; (...,)."""
    given = np.where(truth > 0.5, scores, 1.0 - scores)
    losses: Vector = -np.log(np.maximum(given, 1e-9)).mean(axis=-1)
    return losses


def auc(scores: Vector, truth: npt.NDArray[np.bool_]) -> float:
    """Return the chance that a true one scores higher than a false one, ties counted half; NaN if either kind is
    missing."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    values = scores[order]
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    ends = np.append(starts[1:], len(values))
    for start, end in zip(starts, ends, strict=True):
        ranks[order[start:end]] = 0.5 * (start + end + 1)
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return float("nan")
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))

"""A small predictor: how much is it worth to have a chunk verified? Fitted in profiling, a dot product at run time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predictor:
    """`score(x) = sigmoid(bias + weights . x)`; what was standardised in fitting is folded into the weights."""

    weights: tuple[float, ...]
    bias: float

    def score(self, x: Vector) -> float:
        """In (0, 1), for signals (f,)."""
        return float(1.0 / (1.0 + np.exp(-(self.bias + np.dot(self.weights, x)))))

    def scores(self, x: Matrix) -> Vector:
        """For signals (n, f); shape (n,)."""
        scores: Vector = 1.0 / (1.0 + np.exp(-(self.bias + x @ np.array(self.weights))))
        return scores


def fit(x: Matrix, worth: Vector, penalty: float = 1.0) -> Predictor:
    """Logistic regression of `worth` (n,) in [0, 1] on signals `x` (n, f), by Newton's method.

    A worth between 0 and 1 counts as that share of a success, so that what is predicted is the expected worth.
    `penalty` is the weight of the squared (standardised) coefficients: it decides where the signals do not.
    """
    n, f = x.shape
    centre, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, np.inf)  # a signal that never moves says nothing
    design = np.column_stack((np.ones(n), (x - centre) / scale))
    ridge = np.diag([1e-6, *[penalty] * f])
    beta = np.zeros(f + 1)
    mean = min(max(float(worth.mean()), 1e-6), 1.0 - 1e-6)
    beta[0] = np.log(mean / (1.0 - mean))
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (worth - p) - ridge @ beta
        hessian = (design * (p * (1.0 - p))[:, None]).T @ design + ridge
        step = np.linalg.solve(hessian, gradient)
        beta += step / max(1.0, float(np.abs(step).max()) / 4.0)  # never more than 4 at a time
        if float(np.abs(step).max()) < 1e-8:
            break
    weights = beta[1:] / scale
    return Predictor(tuple(weights.tolist()), float(beta[0] - weights @ np.where(np.isfinite(scale), centre, 0.0)))


def auc(scores: Vector, truth: npt.NDArray[np.bool_]) -> float:
    """The chance that a true one scores higher than a false one, ties counted half; NaN where one kind is missing."""
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

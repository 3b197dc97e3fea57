"""Predictors of a chunk's rejection from its signals: logistic regression, or gradient-boosted trees if they predict
better.

The trees are oblivious (Prokhorenkova et al. 2018): all nodes of a level share one split, so a leaf follows from a few
comparisons. Each tree is a Newton step for the log loss (Friedman 2001; Chen and Guestrin 2016).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.features import JUDGED
from edgellm.spec.gates.profiler import Run

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
_OVERFLOW = 700.0  # where exp would overflow


class Predictor(Protocol):
    """A fitted predictor, evaluated for every chunk at run time."""

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


def fit(x: Matrix, target: Vector, penalty: float = 1.0) -> Linear:
    """Fit a logistic regression of `target` (n,) in [0, 1] on signals `x` (n, f), by Newton's method.

    A target between 0 and 1 counts as that share of a success, so the prediction is the expected target. `penalty` is
    the weight of the squared (standardised) coefficients.
    """
    n, f = x.shape
    centre, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, np.inf)  # a constant signal gets no weight
    design = np.column_stack((np.ones(n), (x - centre) / scale))
    ridge = np.diag([1e-6, *[penalty] * f])
    beta = np.zeros(f + 1)
    beta[0] = log_odds(float(target.mean()))
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (target - p) - ridge @ beta
        hessian = (design * (p * (1.0 - p))[:, None]).T @ design + ridge
        step = np.linalg.solve(hessian, gradient)
        beta += step / max(1.0, float(np.abs(step).max()) / 4.0)  # never more than 4 at a time
        if float(np.abs(step).max()) < 1e-8:
            break
    weights = beta[1:] / scale
    return Linear(tuple(weights.tolist()), float(beta[0] - weights @ np.where(np.isfinite(scale), centre, 0.0)))


def sigmoid(x: float) -> float:
    """Return the sigmoid of one number, without an array."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -_OVERFLOW else 0.0


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
    """Return the area under the ROC curve, ties counted half; NaN if either class is missing."""
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


DEPTH = 6
ROUNDS = 300
_STEP = 0.1  # the learning rate: share of each tree's step that is taken
_PENALTY = 3.0  # weight of squared leaves
_BINS = 32  # a signal is split at up to this many places
_WEIGHTS = 1 << np.arange(DEPTH)  # weight of each answer in the number of a leaf

_Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Trees:
    """`score(x) = sigmoid(bias + one leaf of each tree)`.

    Level l of a tree tests whether signal `places[l]` is above `edges[l]`, and adds 2^l to the leaf's index. Shapes
    (trees, DEPTH), twice, and (trees, 2 ** DEPTH).
    """

    bias: float
    places: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[float, ...], ...]
    leaves: tuple[tuple[float, ...], ...]
    _places: _Places = field(init=False, repr=False, compare=False)
    _edges: Matrix = field(init=False, repr=False, compare=False)
    _leaves: Matrix = field(init=False, repr=False, compare=False)
    _each: _Places = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the arrays. Raises ValueError if the shapes differ from these."""
        trees = len(self.places)
        arrays = {
            "_places": np.array(self.places, dtype=np.intp).reshape(trees, DEPTH),
            "_edges": np.array(self.edges, dtype=np.float64).reshape(trees, DEPTH),
            "_leaves": np.array(self.leaves, dtype=np.float64).reshape(trees, 1 << DEPTH),
            "_each": np.arange(trees),
        }
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    def score(self, x: Vector) -> float:
        """Return the score in (0, 1) for signals (f,)."""
        leaf = (x[self._places] > self._edges) @ _WEIGHTS
        return sigmoid(self.bias + float(self._leaves[self._each, leaf].sum()))

    def scores(self, x: Matrix) -> Vector:
        """Return the scores (n,) for signals (n, f)."""
        scores: Vector = self.stages(x)[-1]
        return scores

    def stages(self, x: Matrix) -> Matrix:
        """Return the scores by only the first 0, 1, 2 ... trees for signals (n, f), shape (trees + 1, n)."""
        added = [np.full(len(x), self.bias)]
        for place, edge, leaf in zip(self._places, self._edges, self._leaves, strict=True):
            added.append(leaf[(x[:, place] > edge) @ _WEIGHTS])
        stages: Matrix = 1.0 / (1.0 + np.exp(-np.cumsum(added, axis=0)))
        return stages


def grow(x: Matrix, truth: Vector, rounds: int = ROUNDS) -> Trees:
    """Return trees fitted to `truth` (n,), each 0 or 1, by signals `x` (n, f)."""
    edges = [_thresholds(column) for column in x.T]
    bins = np.stack([np.searchsorted(asked, column) for asked, column in zip(edges, x.T, strict=True)])
    allowed = np.arange(_BINS) < np.array([len(each) for each in edges])[:, None]
    bias = log_odds(float(truth.mean()))
    total = np.full(len(x), bias)
    places, asked, leaves = [], [], []
    for _ in range(rounds):
        share = 1.0 / (1.0 + np.exp(-total))
        gradient, hessian = truth - share, share * (1.0 - share)
        questions, leaf = _grow_tree(bins, allowed, gradient, hessian)
        gain, weight = (np.bincount(leaf, each, 1 << DEPTH) for each in (gradient, hessian))
        adds = np.round(_STEP * gain / (weight + _PENALTY), 5)
        total += adds[leaf]
        places.append(tuple(place for place, _ in questions))
        asked.append(tuple(float(edges[place][at]) for place, at in questions))
        leaves.append(tuple(adds.tolist()))
    return Trees(bias, tuple(places), tuple(asked), tuple(leaves))


def _thresholds(column: Vector) -> Vector:
    """Return the split values of a signal (n,): between observed values, at its quantiles."""
    values = np.unique(column)
    if len(values) < 2:
        return np.array([np.inf])  # a constant signal is never split
    between = 0.5 * (values[1:] + values[:-1])
    cuts = np.quantile(column, np.linspace(0.0, 1.0, _BINS + 1)[1:-1])
    return between[np.unique(np.clip(np.searchsorted(values, cuts), 0, len(between) - 1))]


def _grow_tree(
    bins: _Places, allowed: Flags, gradient: Vector, hessian: Vector
) -> tuple[list[tuple[int, int]], _Places]:
    """Return one tree: its splits (signal, edge), each the one with the highest gain given those before, and the leaf
    of each sample.

    `bins` (f, n) are the number of edges that each value exceeds; `allowed` (f, _BINS): which edges exist.
    """
    signals, n = bins.shape
    rows = np.arange(signals)[:, None]
    gradients, hessians = (np.broadcast_to(each, (signals, n)).ravel() for each in (gradient, hessian))
    questions = []
    leaf: _Places = np.zeros(n, dtype=np.intp)
    for level in range(DEPTH):
        nodes = 1 << level
        at = ((rows * _BINS + bins) * nodes + leaf).ravel()
        shape = (signals, _BINS, nodes)
        gain, weight = (np.bincount(at, each, signals * _BINS * nodes).reshape(shape) for each in (gradients, hessians))
        gradient_below, hessian_below = gain.cumsum(axis=1), weight.cumsum(axis=1)
        gradient_above, hessian_above = gradient_below[:, -1:] - gradient_below, hessian_below[:, -1:] - hessian_below
        gains = (gradient_below**2 / (hessian_below + _PENALTY) + gradient_above**2 / (hessian_above + _PENALTY)).sum(
            axis=2
        )
        place, edge = divmod(int(np.where(allowed, gains, -1.0).argmax()), _BINS)
        leaf += nodes * (bins[place] > edge)
        questions.append((place, edge))
    return questions, leaf


MIN_FOR_TREES = 1000
"""Chunks from which on trees are tried: they overfit fewer, and growing them takes seconds."""
_FOLDS = 5
LINEAR, TREES = "linear", "trees"
KINDS = {LINEAR: "logistic regression", TREES: "trees"}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A predictor of rejections; `unseen` (n,) are its predictions for chunks of replies that it was not fitted on.

    `losses` are mean log losses of these, for each of `KINDS` that was tried.
    """

    predictor: Predictor
    unseen: Vector
    losses: dict[str, float]


def fit_rejection(runs: Sequence[Run]) -> Rejection:
    """Fit a predictor on the training chunks of `runs`, at least one; `unseen` is in their order."""
    x, rejected = training_data(runs)
    linear = fit(x, rejected)
    fold = np.repeat(np.arange(len(runs)) % _FOLDS, [len(run.training_chunks) for run in runs])
    if len(np.unique(fold)) < _FOLDS:
        return Rejection(linear, linear.scores(x), {})
    unseen = np.empty(len(x))
    for held_out in range(_FOLDS):
        unseen[fold == held_out] = fit(x[fold != held_out], rejected[fold != held_out]).scores(x[fold == held_out])
    losses = {LINEAR: float(log_loss(unseen, rejected))}
    if len(x) < MIN_FOR_TREES:
        return Rejection(linear, unseen, losses)
    grown = _cross_validated_stages(x, rejected, fold)
    count = int(log_loss(grown, rejected).argmin())
    losses[TREES] = float(log_loss(grown[count], rejected))
    if losses[TREES] >= losses[LINEAR]:
        return Rejection(linear, unseen, losses)
    return Rejection(grow(x, rejected, count), grown[count], losses)


def training_data(runs: Sequence[Run]) -> tuple[Matrix, Vector]:
    """Return the training data of the fitted gate: signals (n, len(JUDGED)), and whether each chunk was rejected
    (n,)."""
    seen = [chunk for run in runs for chunk in run.training_chunks]
    x: Matrix = np.array([chunk.signals for chunk in seen])[:, list(JUDGED)]
    return x, np.array([not chunk.whole for chunk in seen], dtype=np.float64)


def _cross_validated_stages(x: Matrix, rejected: Vector, fold: npt.NDArray[np.intp]) -> Matrix:
    """Return `Trees.stages` of every chunk, by trees that grew without its fold."""
    stages: list[Matrix] = []
    order = []
    for held_out in range(_FOLDS):
        own = fold == held_out
        stages.append(grow(x[~own], rejected[~own]).stages(x[own]))
        order.append(np.flatnonzero(own))
    found: Matrix = np.concatenate(stages, axis=1)[:, np.argsort(np.concatenate(order))]
    return found


def as_fields(predictor: Predictor) -> dict[str, Any]:
    """Return a predictor's fields for JSON."""
    names = ("bias", "places", "edges", "leaves") if isinstance(predictor, Trees) else ("bias", "weights")
    return {name: getattr(predictor, name) for name in names}


def without_signal(fields: dict[str, Any], place: int, value: float) -> dict[str, Any]:
    """Return a predictor's fields without the signal at `place`, which is taken for `value` from now on."""
    if "weights" in fields:
        weights = fields["weights"]
        return {"bias": fields["bias"] + value * weights[place], "weights": weights[:place] + weights[place + 1 :]}
    places, edges = [], []
    for tree, asked in zip(fields["places"], fields["edges"], strict=True):
        answers = [-math.inf if value > edge else math.inf for edge in asked]
        edges.append([answer if at == place else edge for at, edge, answer in zip(tree, asked, answers, strict=True)])
        places.append([0 if at == place else at - (at > place) for at in tree])
    return fields | {"places": places, "edges": edges}


def from_fields(fields: dict[str, Any], signals: int = len(JUDGED)) -> Predictor:
    """Return the predictor by `signals` signals whose fields `as_fields` returned. Raises KeyError, TypeError or
    ValueError for anything else."""
    bias = float(fields["bias"])
    if "weights" in fields:
        if len(fields["weights"]) != signals:
            raise ValueError(f"it has {len(fields['weights'])} weights for {signals} features")
        return Linear(tuple(map(float, fields["weights"])), bias)
    places = tuple(tuple(map(int, tree)) for tree in fields["places"])
    if not all(0 <= place < signals for tree in places for place in tree):
        raise ValueError(f"a tree splits on a feature beyond the {signals} that exist")
    edges, leaves = (tuple(tuple(map(float, tree)) for tree in fields[name]) for name in ("edges", "leaves"))
    return Trees(bias, places, edges, leaves)

"""Predictors of a chunk's rejection: a linear model, or trees if they predict unseen replies better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.features import JUDGED
from edgellm.spec.gates.gbdt import Trees, grow
from edgellm.spec.gates.logistic import Linear, Matrix, Predictor, Vector, fit, log_loss
from edgellm.spec.gates.profiler import Run

MANY = 1000
"""Chunks from which on trees are tried: they overfit fewer, and growing them takes seconds."""
_FOLDS = 5
LINEAR, TREES = "linear", "trees"
KINDS = {LINEAR: "a straight law", TREES: "trees"}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A predictor of rejections; `unseen` (n,) are its predictions for chunks of replies that it was not fitted on.

    `losses` are mean log losses of these, for each of `KINDS` that was tried.
    """

    predictor: Predictor
    unseen: Vector
    losses: dict[str, float]


def fit_rejection(runs: Sequence[Run]) -> Rejection:
    """Fit a predictor on the chunks of `runs`, at least one, that the fitted gate is to judge; `unseen` is in their
    order."""
    x, rejected = judged(runs)
    straight = fit(x, rejected)
    fold = np.repeat(np.arange(len(runs)) % _FOLDS, [len(run.judged) for run in runs])
    if len(np.unique(fold)) < _FOLDS:
        return Rejection(straight, straight.scores(x), {})
    unseen = np.empty(len(x))
    for held in range(_FOLDS):
        unseen[fold == held] = fit(x[fold != held], rejected[fold != held]).scores(x[fold == held])
    losses = {LINEAR: float(log_loss(unseen, rejected))}
    if len(x) < MANY:
        return Rejection(straight, unseen, losses)
    grown = _grown(x, rejected, fold)
    count = int(log_loss(grown, rejected).argmin())
    losses[TREES] = float(log_loss(grown[count], rejected))
    if losses[TREES] >= losses[LINEAR]:
        return Rejection(straight, unseen, losses)
    return Rejection(grow(x, rejected, count), grown[count], losses)


def judged(runs: Sequence[Run]) -> tuple[Matrix, Vector]:
    """Return signals (n, len(JUDGED)) of the chunks that the fitted gate is to judge, and which of them were
    rejected (n,)."""
    seen = [chunk for run in runs for chunk in run.judged]
    x: Matrix = np.array([chunk.signals for chunk in seen])[:, list(JUDGED)]
    return x, np.array([not chunk.whole for chunk in seen], dtype=np.float64)


def _grown(x: Matrix, rejected: Vector, fold: npt.NDArray[np.intp]) -> Matrix:
    """Return `Trees.stages` of every chunk, by trees that grew without its fold."""
    stages: list[Matrix] = []
    order = []
    for held in range(_FOLDS):
        own = fold == held
        stages.append(grow(x[~own], rejected[~own]).stages(x[own]))
        order.append(np.flatnonzero(own))
    found: Matrix = np.concatenate(stages, axis=1)[:, np.argsort(np.concatenate(order))]
    return found


def as_fields(predictor: Predictor) -> dict[str, Any]:
    """Return a predictor's fields for JSON."""
    names = ("bias", "places", "edges", "leaves") if isinstance(predictor, Trees) else ("bias", "weights")
    return {name: getattr(predictor, name) for name in names}


def from_fields(fields: dict[str, Any], signals: int = len(JUDGED)) -> Predictor:
    """Return the predictor by `signals` signals whose fields `as_fields` returned. Raises KeyError, TypeError or
    ValueError for anything else."""
    bias = float(fields["bias"])
    if "weights" in fields:
        if len(fields["weights"]) != signals:
            raise ValueError(f"it weighs {len(fields['weights'])} signals, and there are {signals}")
        return Linear(tuple(map(float, fields["weights"])), bias)
    places = tuple(tuple(map(int, tree)) for tree in fields["places"])
    if not all(0 <= place < signals for tree in places for place in tree):
        raise ValueError(f"a tree asks about another signal than the {signals} that there are")
    edges, leaves = (tuple(tuple(map(float, tree)) for tree in fields[name]) for name in ("edges", "leaves"))
    return Trees(bias, places, edges, leaves)

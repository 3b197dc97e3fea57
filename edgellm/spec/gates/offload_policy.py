"""The fitted gate at run time: a chunk's signals, predictors over them, and the value of verifying it.

A reply is correct if each of its wrong chunks was verified. The value of a verdict is what it adds to that probability:
`p_correct * p_rejected * continuation`. The reply must still be correct (`p_correct`: unverified chunks may have been
wrong), this chunk must be wrong, and all later wrong chunks must be verified, too: a budget is better spent on replies
that need one correction than on the beginning of those that need four. `fitting.py` fits the two predictors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgellm.spec.types import Chunk

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

SHARES = (0.1, 0.2, 0.4)
"""Budgets for which a policy is fitted and evidence is collected."""
EPSILON = 1e-6
"""A constant added to a probability before its logarithm is taken."""

NAMES = (
    "doubt of the mean",  # -log of the mean confidence: the paper's c
    "doubt of the least",  # -log of the least confidence
    "doubt of the first",
    "surprise",  # sum of -log confidence over the chunk
    "narrowest margin",
    "mean margin",
    "mean importance",
    "largest importance",
    "importance of the least sure",
    "tokens",
    "place",  # log of 1 + tokens written before
    "doubt so far",  # surprise of all chunks before it
    "agreement",  # log of 1 + matched tokens where the context has the same token, summed over tokens
    "most agreement",
    "dissent",  # the same for a different token
    "most dissent",
    "doubtful dissent",  # dissent times the doubt of the token
    "copied",  # tokens that were taken from the context
    "copied match",  # log of 1 + matched tokens of copied tokens
    "copied doubt",  # doubt of the model at copied tokens
    "prompt difficulty",  # wrong chunks in replies to such prompts (`prompt_difficulty.py`)
)
JUDGED = tuple(at for at, name in enumerate(NAMES) if "importance" not in name)
"""Indices of the signals that the fitted gate uses: importance added nothing to confidence (evidence in the profile),
and measuring it takes time."""

_FLOOR = 1e-4  # least confidence in logarithms
_OVERFLOW = 700.0  # exponent at which exp would overflow


def surprise(chunk: Chunk) -> float:
    """Return minus the log of the probability of the whole chunk under the draft model."""
    return float(-np.log(np.clip(chunk.confidence.astype(np.float64), _FLOOR, 1.0)).sum())


def signals(
    chunk: Chunk, written: int, usual_importance: float = 0.0, so_far: float = 0.0, difficulty: float = 0.0
) -> Vector:
    """Return the signals of a chunk of at least one token after `written` tokens, shape (len(NAMES),).

    `usual_importance` replaces the importance of tokens drafted ahead, for which it was not measured. `so_far` is the
    surprise of all earlier chunks of the reply, and `difficulty` that of its prompt.
    """
    confidence = chunk.confidence.astype(np.float64)
    doubt = -np.log(np.clip(confidence, _FLOOR, 1.0))
    importance = chunk.importance.copy()
    importance[: chunk.ahead] = usual_importance
    least = int(doubt.argmax())
    has = len(importance) > 0
    return np.array(
        (
            -np.log(max(_FLOOR, float(confidence.mean()))),
            doubt[least],
            doubt[0],
            doubt.sum(),
            chunk.margin.min(),
            chunk.margin.mean(),
            importance.mean() if has else usual_importance,
            importance.max() if has else usual_importance,
            importance[least] if has else usual_importance,
            len(chunk),
            np.log1p(written),
            so_far,
            *_context_features(chunk, doubt),
            difficulty,
        )
    )


def _context_features(chunk: Chunk, doubt: Vector) -> tuple[float, ...]:
    """Return the signals from `agreement` to `copied doubt`; zeros without a context match."""
    match = chunk.context_match
    if match is None:
        return (0.0,) * 8
    matched = np.log1p(np.where(match.tokens >= 0, match.matched, 0).astype(np.float64))
    same = match.tokens == chunk.ids
    copied = match.copied
    agreement, dissent = np.where(same & ~copied, matched, 0.0), np.where(same, 0.0, matched)
    return (
        agreement.sum(),
        agreement.max(),
        dissent.sum(),
        dissent.max(),
        float((dissent * doubt).sum()),
        float(copied.sum()),
        float(matched[copied].sum()),
        float(doubt[copied].sum()),
    )


LINEAR, TREES = "linear", "trees"
KINDS = {LINEAR: "logistic regression", TREES: "trees"}


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


def sigmoid(x: float) -> float:
    """Return the sigmoid of one number, without an array."""
    return 1.0 / (1.0 + math.exp(-x)) if x > -_OVERFLOW else 0.0


DEPTH = 6
_WEIGHTS = 1 << np.arange(DEPTH)  # weight of each answer in the number of a leaf
_Places = npt.NDArray[np.intp]


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


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy for budgets near `share`. `rejected` predicts rejection from the signals `JUDGED`, `continuation` the
    continuation value from those and the log of that prediction.

    `scores` (n,) are the values of profiled chunks when the policy was followed at that budget.
    """

    share: float
    rejected: Predictor
    continuation: Predictor
    scores: tuple[float, ...] = ()

    def judge(self, signals: Vector) -> tuple[float, float]:
        """Return, for all signals of a chunk, shape (len(NAMES),), the probability of rejection and the continuation
        value."""
        features = signals[list(JUDGED)]
        rejected = self.rejected.score(features)
        return rejected, self.continuation.score(np.append(features, np.log(rejected + EPSILON)))


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
            raise ValueError(f"it has {len(fields['weights'])} weights for {signals} features")
        return Linear(tuple(map(float, fields["weights"])), bias)
    places = tuple(tuple(map(int, tree)) for tree in fields["places"])
    if not all(0 <= place < signals for tree in places for place in tree):
        raise ValueError(f"a tree splits on a feature beyond the {signals} that exist")
    edges, leaves = (tuple(tuple(map(float, tree)) for tree in fields[name]) for name in ("edges", "leaves"))
    return Trees(bias, places, edges, leaves)

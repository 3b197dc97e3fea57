"""Boosted trees: a predictor that captures interactions of signals, in three array operations at run time.

Every level of a tree asks one question of all that come to it (Prokhorenkova et al., 2018), so the leaf of each tree
follows from the answers to a handful of questions. Each tree is a step of Newton's method for the log loss of the sum
of those before it (Friedman, 2001; Chen and Guestrin, 2016).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.logistic import Matrix, Vector, log_odds, sigmoid

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

    Question l of a tree is whether signal `places[l]` is above `edges[l]`, and adds 2^l to the number of the leaf.
    Shapes (trees, DEPTH), twice, and (trees, 2 ** DEPTH).
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
        said: Vector = self.stages(x)[-1]
        return said

    def stages(self, x: Matrix) -> Matrix:
        """Return the scores by only the first 0, 1, 2 ... trees for signals (n, f), shape (trees + 1, n)."""
        added = [np.full(len(x), self.bias)]
        for place, edge, leaf in zip(self._places, self._edges, self._leaves, strict=True):
            added.append(leaf[(x[:, place] > edge) @ _WEIGHTS])
        stages: Matrix = 1.0 / (1.0 + np.exp(-np.cumsum(added, axis=0)))
        return stages


def grow(x: Matrix, truth: Vector, rounds: int = ROUNDS) -> Trees:
    """Return trees fitted to `truth` (n,), each 0 or 1, by signals `x` (n, f)."""
    edges = [_questions(column) for column in x.T]
    bins = np.stack([np.searchsorted(asked, column) for asked, column in zip(edges, x.T, strict=True)])
    allowed = np.arange(_BINS) < np.array([len(each) for each in edges])[:, None]
    bias = log_odds(float(truth.mean()))
    total = np.full(len(x), bias)
    places, asked, leaves = [], [], []
    for _ in range(rounds):
        share = 1.0 / (1.0 + np.exp(-total))
        slope, bend = truth - share, share * (1.0 - share)
        questions, leaf = _tree(bins, allowed, slope, bend)
        gain, weight = (np.bincount(leaf, each, 1 << DEPTH) for each in (slope, bend))
        adds = np.round(_STEP * gain / (weight + _PENALTY), 5)
        total += adds[leaf]
        places.append(tuple(place for place, _ in questions))
        asked.append(tuple(float(edges[place][at]) for place, at in questions))
        leaves.append(tuple(adds.tolist()))
    return Trees(bias, tuple(places), tuple(asked), tuple(leaves))


def _questions(column: Vector) -> Vector:
    """Return the values at which a signal (n,) is split: between values that were seen, at its quantiles."""
    values = np.unique(column)
    if len(values) < 2:
        return np.array([np.inf])  # a signal that never moves answers nothing
    between = 0.5 * (values[1:] + values[:-1])
    cuts = np.quantile(column, np.linspace(0.0, 1.0, _BINS + 1)[1:-1])
    return between[np.unique(np.clip(np.searchsorted(values, cuts), 0, len(between) - 1))]


def _tree(bins: _Places, allowed: Flags, slope: Vector, bend: Vector) -> tuple[list[tuple[int, int]], _Places]:
    """Return one tree: its questions (signal, edge), each the one that gains most given all asked before, and the leaf
    of each sample.

    `bins` (f, n): how many edges of a signal each value is above; `allowed` (f, _BINS): which edges exist.
    """
    signals, n = bins.shape
    rows = np.arange(signals)[:, None]
    slopes, bends = (np.broadcast_to(each, (signals, n)).ravel() for each in (slope, bend))
    questions = []
    leaf: _Places = np.zeros(n, dtype=np.intp)
    for level in range(DEPTH):
        nodes = 1 << level
        at = ((rows * _BINS + bins) * nodes + leaf).ravel()
        shape = (signals, _BINS, nodes)
        gain, weight = (np.bincount(at, each, signals * _BINS * nodes).reshape(shape) for each in (slopes, bends))
        below, light = gain.cumsum(axis=1), weight.cumsum(axis=1)
        above, heavy = below[:, -1:] - below, light[:, -1:] - light
        gained = (below**2 / (light + _PENALTY) + above**2 / (heavy + _PENALTY)).sum(axis=2)
        place, edge = divmod(int(np.where(allowed, gained, -1.0).argmax()), _BINS)
        leaf += nodes * (bins[place] > edge)
        questions.append((place, edge))
    return questions, leaf

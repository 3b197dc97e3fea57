"""The most probable tokens of a row of logits, cheaply: no sort of the vocabulary, no copy of the row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgellm.engine.types import Floats, Ids
from edgellm.errors import EngineFailed

# exponentials are computed in slices that stay in the processor's cache and in the allocator's small bins
_SLICE = 16_384
_GROUPS = 1_024


@dataclass(frozen=True, slots=True)
class Top2:
    """The most probable token, its probability, and that of the runner-up."""

    id: int
    p1: float
    p2: float


def top2(logits: Floats) -> Top2:
    """Return argmax and the two largest softmax probabilities over the full vocabulary; on a tie the lowest id wins.

    `logits` has shape (n_vocab,) or (1, n_vocab).

    Raises:
        EngineFailed: the largest logit is not a number or not finite.
    """
    row = logits.reshape(-1)
    first = int(row.argmax())
    peak = row[first]
    total = _normaliser(row, peak)
    below, above = row[:first], row[first + 1 :]
    # the bare reductions: the arrays' methods would double the cost on a small vocabulary
    second = max(np.maximum.reduce(below, initial=-np.inf), np.maximum.reduce(above, initial=-np.inf))
    return Top2(first, 1.0 / total, math.exp(second - peak) / total)


def top_k(logits: Floats, k: int) -> tuple[Ids, Floats]:
    """Return the `k` most probable ids, most probable first (on a tie the lowest id), and their probabilities.

    Both of shape (min(k, n_vocab),); probabilities are softmax over the full vocabulary and need not sum to 1.

    Raises:
        EngineFailed: the largest logit is not a number or not finite.
    """
    row = logits.reshape(-1)
    n = len(row)
    k = max(0, min(k, n))
    floor = np.float32(-np.inf)
    if 0 < k <= _GROUPS <= n:
        # k groups have a maximum of at least the k-th largest maximum, so nothing below it is among the k largest
        maxima = row[: n - n % _GROUPS].reshape(-1, _GROUPS).max(axis=0)
        floor = np.partition(maxima, _GROUPS - k)[_GROUPS - k]
    candidates = np.flatnonzero(row >= floor)
    ids = candidates[np.argsort(-row[candidates], kind="stable")[:k]].astype(np.int32)
    peak = row.max()
    total = _normaliser(row, peak)
    return ids, np.exp(row[ids] - peak) / np.float32(total)


def _normaliser(row: Floats, peak: np.float32) -> float:
    """Return the sum of exp(logit - peak)."""
    if not math.isfinite(peak):
        raise EngineFailed(f"The model's largest logit is {peak}.", "Its file may be damaged: pull it again.")
    total = 0.0
    for i in range(0, len(row), _SLICE):
        part = row[i : i + _SLICE] - peak
        total += float(np.add.reduce(np.exp(part, out=part)))
    return total

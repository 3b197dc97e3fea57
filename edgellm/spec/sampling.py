"""From logits to a token: truncated distributions, and randomness that depends only on seed and position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.errors import EngineFailed, InvalidOption
from edgellm.spec.types import Distribution, Expected, Floats, Ids, Logprobs, Penalties, Sampling

Uniforms: TypeAlias = npt.NDArray[np.float64]
Units: TypeAlias = npt.NDArray[np.int64]

UNITS = 2**16  # a draft's probabilities are whole multiples of 1/UNITS, so that they travel without loss
WIDEST = 4096  # tokens in the distribution of a draft, whatever the vocabulary
SHARE, LEAST = 200, 12  # one in SHARE tokens of the vocabulary, but at least LEAST
_WORDS = 4  # a Philox block is four 64-bit words: one block per position
_MASK = 2**64 - 1
_COLDEST = 1e-6  # a lower temperature is no less random than this, and its quotients would overflow
_HOTTEST = 1e30  # a higher temperature leaves all tokens alike already, and would itself overflow


class Purpose(IntEnum):
    """The purpose of random numbers. Each purpose has a stream of its own."""

    DRAFT = 1
    VERIFY = 2
    GATE = 3


def uniforms(seed: int, position: int, n: int, purpose: Purpose = Purpose.VERIFY) -> Uniforms:
    """Return numbers in [0, 1) for positions `position` to `position + n - 1`; shape (n, 4), one row per position.

    Counter-based (Philox, keyed by seed and purpose, counted by position): a position has the same row however the
    positions before it were cut into chunks, so a rebuilt session or a replay draws the same numbers.
    """
    key = np.array([seed & _MASK, purpose], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(n * _WORDS)
    numbers: Uniforms = np.multiply(words >> np.uint64(11), 2.0**-53, dtype=np.float64).reshape(n, _WORDS)
    return numbers


def distribution(logits: Floats, sampling: Sampling) -> Distribution:
    """Return the distribution to draw a draft from, for `logits` of shape (n_vocab,), in a form that can be sent
    exactly.

    It is `exact_distribution` limited to the `widest` most probable tokens and `rounded`. The verified text follows the
    verifier's own distribution whichever distribution drafts are drawn from, as long as the verifier knows it.

    Raises:
        EngineFailed: the logits contain a NaN, or no finite value.
    """
    most = widest(len(logits))
    if not 0 < sampling.top_k <= most:
        sampling = replace(sampling, top_k=most)
    return rounded(exact_distribution(logits, sampling))


REPEAT_WINDOW = 64
"""Last tokens of the text that the repeat penalty looks at, as in llama.cpp and Ollama."""


def penalised(logits: Floats, text: Ids, penalties: Penalties) -> Floats:
    """Return a copy of `logits` (n_vocab,), which follow `text` (n,), changed by `penalties`.

    The repeat penalty is that of CTRL (Keskar et al. 2019); frequency and presence are subtracted as OpenAI's API
    defines them. Ids outside `logits` have no effect.
    """
    changed = logits.copy()
    if penalties.repeat != 1.0:
        seen = np.unique(text[-REPEAT_WINDOW:])
        seen = seen[seen < len(logits)]
        old = changed[seen]
        changed[seen] = np.where(old > 0.0, old / np.float32(penalties.repeat), old * np.float32(penalties.repeat))
    if penalties.frequency or penalties.presence:
        seen, times = np.unique(text[penalties.start :], return_counts=True)
        known = seen < len(logits)
        changed[seen[known]] -= (times[known] * penalties.frequency + penalties.presence).astype(np.float32)
    if penalties.bias:
        ids, amounts = zip(*penalties.bias, strict=True)
        places = np.array(ids)
        known = places < len(logits)
        changed[places[known]] += np.array(amounts, dtype=np.float32)[known]
    return changed


def widest(vocabulary: int) -> int:
    """Return from how many tokens a draft is drawn at most: they take less than 0.5 % of the whole vocabulary's size.

    Tokens beyond them are hardly ever drawn, and would be sent with every draft.
    """
    return min(WIDEST, max(LEAST, vocabulary // SHARE))


def rounded(distribution: Distribution) -> Distribution:
    """Return `distribution` in whole units of 1/`UNITS`, which add up to 1 exactly; tokens left with none are dropped.

    Cumulative sums are rounded, not the probabilities, so that no mass is lost and no token gains or loses a whole
    unit. A rounded distribution comes back unchanged, and every machine reads the same float32 from the same units.
    """
    steps = distribution.probs.cumsum(dtype=np.float64)
    marks = np.rint(steps * (UNITS / steps[-1]))
    marks[1:] -= marks[:-1].copy()
    kept = marks > 0
    return Distribution(distribution.ids[kept], (marks[kept] / UNITS).astype(np.float32))


def units(distribution: Distribution) -> Units:
    """Return the probabilities (k,) of a `rounded` distribution, in whole units of 1/`UNITS`.

    Raises:
        InvalidOption: it is not rounded: a draft drawn from it would be judged by another distribution.
    """
    counts = distribution.probs.astype(np.float64) * UNITS
    whole = counts.astype(np.int64)
    if not (whole == counts).all() or int(whole.sum()) != UNITS or int(whole.min()) < 1:
        raise InvalidOption(
            f"A draft was drawn from probabilities that are not multiples of 1/{UNITS} with sum 1.",
            "Draw drafts from what `edgellm.spec.sampling.rounded` returns.",
        )
    return whole


def exact_distribution(logits: Floats, sampling: Sampling) -> Distribution:
    """Return the distribution that the verifier draws from, for `logits` of shape (n_vocab,).

    Temperature first, then top-k, then top-p over what top-k left, then min-p, then renormalised. Equal logits are kept
    in order of token id, so that the result does not depend on the machine. Greedy: all mass on the most probable one.

    Raises:
        EngineFailed: the logits hold a NaN, or no finite value.
    """
    truncated = _truncated(logits, sampling)
    if sampling.min_p <= 0.0 or len(truncated.ids) == 1:
        return truncated
    kept = truncated.probs >= np.float32(sampling.min_p) * truncated.probs.max()
    probs = truncated.probs[kept]
    return Distribution(truncated.ids[kept], probs / np.float32(probs.sum(dtype=np.float64)))


def _truncated(logits: Floats, sampling: Sampling) -> Distribution:
    """Return `exact_distribution` without min-p."""
    best = int(logits.argmax())
    top = float(logits[best])
    if not math.isfinite(top):
        raise EngineFailed(
            f"The model's output is not a number (largest logit {top}).",
            "The model file may be damaged: download it again.",
        )
    if sampling.greedy or sampling.top_k == 1:
        return Distribution(np.array([best], dtype=np.int32), np.ones(1, dtype=np.float32))
    cold = np.float32(min(max(sampling.temperature, _COLDEST), _HOTTEST))
    if 0 < sampling.top_k < len(logits):
        ids = _largest(logits, sampling.top_k)
        weights = np.exp((logits[ids] - top) / cold)
        held = weights.cumsum(dtype=np.float64)
        total = held[-1]
    else:
        everything = np.exp((logits - top) / cold)
        total = float(np.add.reduce(everything, dtype=np.float64))
        # The tokens below this floor add up to less than top-p cuts away: they need not be sorted.
        near = np.flatnonzero(everything > max(0.0, (1.0 - sampling.top_p) * total / (len(logits) + 1)))
        if sampling.top_p >= 1.0:
            return Distribution(near.astype(np.int32), everything[near] / np.float32(total))
        ids = near[(-everything[near]).argsort(kind="stable")]
        weights = everything[ids]
        held = weights.cumsum(dtype=np.float64)
    n = len(weights) if weights[-1] > 0 else int(np.count_nonzero(weights))  # the last ones may underflow
    if sampling.top_p < 1.0:
        n = min(n, int(held.searchsorted(sampling.top_p * total)) + 1)
    by_id = ids[:n].argsort()
    return Distribution(ids[by_id].astype(np.int32), weights[by_id] / np.float32(held[n - 1]))


def draw(distribution: Distribution, u: float) -> int:
    """Return the token that the number `u` in [0, 1) falls on."""
    steps = distribution.probs.cumsum(dtype=np.float64)
    place = int(steps.searchsorted(u * steps[-1], side="right"))
    return int(distribution.ids[min(place, len(steps) - 1)])


def probability(distribution: Distribution, token: int) -> float:
    """Return the probability of `token`, 0 if it was cut off."""
    place = int(distribution.ids.searchsorted(token))
    if place < len(distribution.ids) and distribution.ids[place] == token:
        return float(distribution.probs[place])
    return 0.0


def _largest(logits: Floats, k: int) -> npt.NDArray[np.intp]:
    """Return the ids of the `k` largest logits, largest first; of equal ones the lower id first. No sort of the
    vocabulary."""
    columns = 4 * k
    rows = len(logits) // columns
    if rows < 2:
        return (-logits).argsort(kind="stable")[:k]
    # The k-th largest of many columns' maxima is a floor for the k-th largest of all: few logits reach it.
    maxima = logits[: rows * columns].reshape(rows, columns).max(axis=0)
    maxima.partition(columns - k)
    near = np.flatnonzero(logits >= maxima[columns - k])
    order: npt.NDArray[np.intp] = (-logits[near]).argsort(kind="stable")[:k]
    return near[order]


def likeliest(rows: Floats, k: int, start: int) -> Expected:
    """Return the `k` likeliest next tokens of each of `rows` (n, n_vocab), logits behind the positions from `start`
    on."""
    ids = np.argpartition(rows, rows.shape[1] - k, axis=1)[:, -k:]
    best = np.take_along_axis(rows, ids, axis=1)
    order = np.argsort(-best, axis=1)
    ids, best = np.take_along_axis(ids, order, axis=1), np.take_along_axis(best, order, axis=1)
    top = best[:, :1]
    total = np.exp(rows - top).sum(axis=1, keepdims=True)
    return Expected(start, ids.astype(np.int32), (np.exp(best - top) / total).astype(np.float32))


def logprobs(rows: Floats, tokens: Ids, k: int) -> Iterator[Logprobs]:
    """Yield for each token of `tokens` (n,) its log probability by its row of logits `rows` (n or more, n_vocab), and
    those of the `k` likeliest tokens.

    These are logarithms of the model's own softmax, whatever the reply is drawn from.
    """
    for row, token in zip(rows, tokens.tolist(), strict=False):
        best = _largest(row, k) if k else np.empty(0, dtype=np.intp)
        top = float(row.max())
        total = top + math.log(float(np.exp(row - np.float32(top)).sum(dtype=np.float64)))
        yield Logprobs(float(row[token]) - total, best.astype(np.int32), row[best].astype(np.float64) - total)

"""The chance that the verifier accepts a token, learned from its verdicts: by the confidence of a draft model, and by
the evidence for a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import log2
from operator import mul

import numpy as np
import numpy.typing as npt

from edgellm.spec.types import Chunk

Probabilities = npt.NDArray[np.float64]

_MEMORY = 0.995  # weight of a token after each later one of its kind


class Share:
    """The share of accepted tokens of one kind; older tokens count less."""

    __slots__ = ("_accepted", "_tries")

    def __init__(self) -> None:
        self._accepted = self._tries = 0.0

    def learn(self, accepted: bool) -> None:
        """Learn whether a token was accepted."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._tries = _MEMORY * self._tries + 1.0

    def chance(self, prior: float, weight: float) -> float:
        """Return the share; the `prior` chance counts as `weight` tokens."""
        return (self._accepted + weight * prior) / (self._tries + weight)


class ConfidenceAcceptance:
    """The share of accepted tokens for each range of a draft model's confidence. Before any verdict the confidence
    itself is taken for the chance."""

    def __init__(self) -> None:
        self._shares: dict[int, Share] = defaultdict(Share)

    def survives(self, confidence: Sequence[float]) -> list[float]:
        """Return for each token the chance that it and all before it are accepted, by their `confidence`."""
        return list(accumulate((self._shares[_range(each)].chance(each, 4.0) for each in confidence), mul))

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        """Return the chances that a chunk's tokens 0..t-1 are accepted and token t is not, for t in 0..gamma, shape
        (gamma + 1,); the last entry is *nothing rejected*.

        The paper estimates them from one acceptance rate of the pair (`drafters.parallel.rejection`): there a token
        with a confidence of 0.05 is still accepted more often than not, and most guesses go to verdicts that hardly
        ever happen.
        """
        reached = np.array([1.0, *self.survives(confidence)])
        return np.append(-np.diff(reached), reached[-1])

    def observe(self, chunk: Chunk, accepted: int) -> None:
        """Learn that the first `accepted` tokens of a chunk were accepted; copied tokens are left out."""
        own = 0 if chunk.retrieved else len(chunk) - chunk.tail
        if own:
            self.learn(chunk.confidence[:own].tolist(), min(own, accepted))

    def learn(self, confidence: Sequence[float], accepted: int) -> None:
        """Learn that the first `accepted` of the drafted tokens with this `confidence` were accepted."""
        for number, each in enumerate(confidence[: accepted + 1]):
            self._shares[_range(each)].learn(number < accepted)


def _range(confidence: float) -> int:
    """Return the number of a range of confidence: each has about two thirds of the doubt of the one before."""
    return int(-1.5 * log2(max(1.0 - confidence, 0.005)))


MAX_MATCH = 8
"""Matches of this many tokens and more are one kind."""
PRIORS = (0.35, 0.5, 0.5, 0.3, 0.4)
"""The prior chance of a token that only the source at this place of `params.SOURCES` offers."""
_EXPECTED_TOKENS = 16.0  # tokens as expected that the trust in new chances starts with
_DECAY = 0.98  # weight of a draft after each later one in the trust in chances
_SHARE_BIT, _MATCH_BIT, _AGREE_BIT, _DIFFER_BIT = 1, 3, 7, 15  # first bit of each field; bit 0: within a word
_MIDDLE = (1 << _DIFFER_BIT) - 1  # everything but the differing sources
_COARSE = _MIDDLE & ~((1 << _AGREE_BIT) - 1) | 1  # agreeing sources, and the bit for within a word


def evidence(agree: int, differ: int, matched: int, share: float, inside: bool) -> int:
    """Return a copied token's evidence, packed into one int because it is looked up for every offered token: bit masks
    of the sources that offer it (`agree`) or another token (`differ`); `matched` tokens before it match, it follows in
    `share` of the matches, and `inside` a word, where copies are rarely rejected."""
    level = 2 if share > 0.8 else 1 if share > 0.4 else 0
    match = min(MAX_MATCH, matched)
    return differ << _DIFFER_BIT | agree << _AGREE_BIT | match << _MATCH_BIT | level << _SHARE_BIT | inside


def agrees(kind: int) -> int:
    """Return the bit mask of the sources that offer a token, from its evidence."""
    return (kind & _MIDDLE) >> _AGREE_BIT


class EvidenceAcceptance:
    """The share of accepted copies by kind of evidence; rarely seen kinds fall back on coarser ones."""

    def __init__(self, priors: Sequence[float] = PRIORS) -> None:
        """Start from `priors[i]`, the chance of a token that only source i offers."""
        self._priors = priors
        self._levels: tuple[tuple[int, dict[int, Share]], ...] = ((_COARSE, {}), (_MIDDLE, {}), (-1, {}))
        self._cache: dict[int, float] = {}  # chances since the last verdict
        self._expected = self._accepted = _EXPECTED_TOKENS  # drafted tokens, decaying

    def chance(self, kind: int) -> float:
        """Return the chance in (0, 1) that the verifier accepts a token of this kind after accepting all before it."""
        chance = self._cache.get(kind)
        if chance is None:
            chance = self._prior(kind & _MIDDLE)
            for mask, level in self._levels:
                if (known := level.get(kind & mask)) is not None:
                    chance = known.chance(chance, 2.0)
            self._cache[kind] = chance
        return chance

    @property
    def trust(self) -> float:
        """Return accepted over expected tokens of recent drafts, at most 1. The likeliest of several offers tends to be
        overestimated, and rejections come in clusters."""
        return min(1.0, self._accepted / self._expected)

    def record_draft(self, expected: float, accepted: int) -> None:
        """Learn from a draft: `accepted` of `expected` tokens. Without a draft, distrust fades."""
        if expected:
            self._expected = _DECAY * self._expected + expected
            self._accepted = _DECAY * self._accepted + accepted
        else:
            self._accepted += (1.0 - _DECAY) * (self._expected - self._accepted)

    def learn(self, kind: int, accepted: bool) -> None:
        """Learn whether a token of this kind was accepted."""
        self._cache.clear()
        for mask, level in self._levels:
            level.setdefault(kind & mask, Share()).learn(accepted)

    def _prior(self, middle: int) -> float:
        agree, match, level = middle >> _AGREE_BIT, middle >> _MATCH_BIT & 15, middle >> _SHARE_BIT & 3
        best = max(prior for bit, prior in enumerate(self._priors) if agree >> bit & 1)
        if not match:  # Only its place speaks for the token.
            best *= 0.2
        return (best + (1.0 - best) * match / (MAX_MATCH + 2.0)) * (0.4, 0.7, 1.0)[level]

"""The chance that the verifier accepts a token, learned from its verdicts: by the confidence of a draft model, and by
the evidence for a copy."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import log2
from operator import mul
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.spec.params import SOURCES
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

        The paper (Synera, 4.4) estimates them from one acceptance rate of the pair: there a token with a confidence of
        0.05 is still accepted more often than not, and most guesses go to verdicts that hardly ever happen.
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
_EXPECTED_TOKENS = 16.0  # tokens as expected that the trust in new chances starts with
DECAY = 0.98
"""Weight of a round after each later one: about the last fifty count."""
Evidence: TypeAlias = tuple[int, bool, int, int, int]
"""The evidence for a copied token: the bit mask of the sources that offer it, whether it continues a word, where copies
are rarely rejected, the tokens before it that match, the level of its share of the matches, and the mask of the sources
that offer another token."""


def evidence(agree: int, differ: int, matched: int, share: float, inside: bool) -> Evidence:
    """Return the evidence for a token that sources `agree` on, and others `differ`, and that follows in `share` of the
    matches."""
    return agree, inside, min(MAX_MATCH, matched), 2 if share > 0.8 else 1 if share > 0.4 else 0, differ


class EvidenceAcceptance:
    """The share of accepted copies by kind of evidence; rarely seen kinds fall back on coarser ones."""

    _parts = 2, 4, 5  # parts of the evidence that make a kind, the coarsest first

    def __init__(self, priors: Sequence[float] = ()) -> None:
        """Start from `priors[i]`, the chance of a token that only source i offers, by default those of `SOURCES`."""
        self._priors = priors or list(SOURCES.values())
        self._shares: dict[tuple[int, ...], Share] = {}  # by the first two, four or five parts of the evidence
        self._cache: dict[Evidence, float] = {}  # chances since the last verdict
        self._expected = self._accepted = _EXPECTED_TOKENS  # drafted tokens, decaying

    def chance(self, kind: Evidence) -> float:
        """Return the chance in (0, 1) that the verifier accepts a token of this kind after accepting all before it."""
        chance = self._cache.get(kind)
        if chance is None:
            chance = self._prior(kind)
            for parts in self._parts:
                if (known := self._shares.get(kind[:parts])) is not None:
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
            self._expected = DECAY * self._expected + expected
            self._accepted = DECAY * self._accepted + accepted
        else:
            self._accepted += (1.0 - DECAY) * (self._expected - self._accepted)

    def learn(self, kind: Evidence, accepted: bool) -> None:
        """Learn whether a token of this kind was accepted."""
        self._cache.clear()
        for parts in self._parts:
            self._shares.setdefault(kind[:parts], Share()).learn(accepted)

    def _prior(self, kind: Evidence) -> float:
        agree, _, match, level, _ = kind
        best = max(prior for bit, prior in enumerate(self._priors) if agree >> bit & 1)
        if not match:  # Only its place speaks for the token.
            best *= 0.2
        return (best + (1.0 - best) * match / (MAX_MATCH + 2.0)) * (0.4, 0.7, 1.0)[level]

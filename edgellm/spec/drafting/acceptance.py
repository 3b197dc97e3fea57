"""The chance that the verifier accepts a token, learned from its verdicts: by the confidence of a draft model, and by
the evidence for a copy."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import log2
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgellm.spec.params import SOURCES
from edgellm.spec.types import Chunk

Probabilities = npt.NDArray[np.float64]

DECAY = 0.98
"""Weight of a token after each later one of its kind, and of a round after each later one: about fifty count."""
_PRIOR_TOKENS = 4.0  # tokens that what is expected beforehand counts as


class Share:
    """The share of accepted tokens of one kind; older tokens count less."""

    __slots__ = ("_accepted", "_tries")

    def __init__(self) -> None:
        self._accepted = self._tries = 0.0

    def learn(self, accepted: bool) -> None:
        """Learn whether a token was accepted."""
        self._accepted = DECAY * self._accepted + accepted
        self._tries = DECAY * self._tries + 1.0

    def chance(self, prior: float) -> float:
        """Return the share, with a `prior` chance."""
        return (self._accepted + _PRIOR_TOKENS * prior) / (self._tries + _PRIOR_TOKENS)


class ConfidenceAcceptance:
    """The share of accepted tokens for each range of a draft model's confidence. Before any verdict the confidence
    itself is taken for the chance."""

    def __init__(self) -> None:
        self._shares: dict[int, Share] = defaultdict(Share)

    def survives(self, confidence: Sequence[float]) -> list[float]:
        """Return for each token the chance that it and all before it are accepted, by their `confidence`."""
        return list(accumulate((self._shares[_range(each)].chance(each) for each in confidence), mul))

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


class Evidence(NamedTuple):
    """The evidence for a copied token."""

    agree: int  # bit mask of the sources that offer it
    inside: bool  # it continues a word, where copies are rarely rejected
    matched: int  # tokens before it that match
    level: int  # 0 to 2, by its share of the matches


def evidence(agree: int, matched: int, share: float, inside: bool) -> Evidence:
    """Return the evidence for a token that sources `agree` on, and that follows in `share` of the matches."""
    return Evidence(agree, inside, min(MAX_MATCH, matched), 2 if share > 0.8 else 1 if share > 0.4 else 0)


class EvidenceAcceptance:
    """The share of accepted copies by their evidence."""

    def __init__(self, priors: Sequence[float] = ()) -> None:
        """Start from `priors[i]`, the chance of a token that only source i offers, by default those of `SOURCES`."""
        self._priors = priors or list(SOURCES.values())
        self._shares: dict[Evidence, Share] = defaultdict(Share)
        self._expected = self._accepted = _PRIOR_TOKENS  # drafted tokens, decaying

    def chance(self, kind: Evidence) -> float:
        """Return the chance in (0, 1) that the verifier accepts a token of this kind after accepting all before it."""
        best = max(prior for bit, prior in enumerate(self._priors) if kind.agree >> bit & 1)
        prior = (best + (1.0 - best) * kind.matched / (MAX_MATCH + 2.0)) * (0.4, 0.7, 1.0)[kind.level]
        return self._shares[kind].chance(prior)

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
        self._shares[kind].learn(accepted)

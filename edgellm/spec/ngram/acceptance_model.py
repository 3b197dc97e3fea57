"""The acceptance probability of retrieved tokens, learned from earlier verdicts.

It depends on a token's evidence: the sources that offer it, those that offer another token, the length of the match,
how often the token follows it, and whether it continues a word (within a word copies are rarely rejected). The evidence
is packed into one int because it is looked up for every offered token.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_MATCH = 8
"""Matches of this many tokens and more are one kind."""
WEIGHT = 2.0
"""Tries that the chance of a coarser kind counts for."""
HALVED_AT = 400.0
"""Tries of one kind that are remembered; then old ones count less."""
INITIAL_TOKENS = 16.0
"""Tokens, all as expected, that new chances start with."""
DECAY = 0.98
"""Weight of a draft after each later one in the trust in chances."""

_SHARE_BIT, _MATCH_BIT, _AGREE_BIT, _DIFFER_BIT = 1, 3, 7, 15  # the bit at which each begins; bit 0: within a word
_MIDDLE = (1 << _DIFFER_BIT) - 1  # all but the sources that differ
_COARSE = _MIDDLE & ~((1 << _AGREE_BIT) - 1) | 1  # the agreeing sources, and whether it is within a word


def evidence(agree: int, differ: int, matched: int, share: float, inside: bool) -> int:
    """Return a token's evidence as one int. `agree` and `differ` are bit masks of the sources (eight at most) that
    offer it or another token; `matched` tokens before it match, it follows in `share` of the matches, and `inside` a
    word."""
    level = 2 if share > 0.8 else 1 if share > 0.4 else 0
    match = min(MAX_MATCH, matched)
    return differ << _DIFFER_BIT | agree << _AGREE_BIT | match << _MATCH_BIT | level << _SHARE_BIT | inside


def agrees(kind: int) -> int:
    """Return the bit mask of the sources that offer a token, from its evidence."""
    return (kind & _MIDDLE) >> _AGREE_BIT


class AcceptanceModel:
    """Running acceptance by kind of evidence; rarely seen kinds fall back on coarser ones."""

    def __init__(self, priors: Sequence[float]) -> None:
        """Start from `priors[i]`, the chance of a token that only source i offers, before anything was seen."""
        self._priors = tuple(priors)
        self._unseen: dict[int, float] = {}  # chances before anything was seen
        self._coarse: dict[int, list[float]] = {}  # hits and tries, as in the next two dictionaries
        self._middle: dict[int, list[float]] = {}
        self._fine: dict[int, list[float]] = {}
        self._cache: dict[int, float] = {}  # cache of chances since something was last learned
        self._expected = self._accepted = (
            INITIAL_TOKENS  # drafted tokens that were expected to be accepted, and that were
        )

    def chance(self, kind: int) -> float:
        """Return the chance in (0, 1) that the verifier accepts a token of this kind, given that it has accepted
        those before it."""
        cached = self._cache.get(kind)
        if cached is not None:
            return cached
        middle = kind & _MIDDLE
        chance = self._unseen.get(middle)
        if chance is None:
            chance = self._unseen[middle] = self._prior(middle)
        for known in (self._coarse.get(kind & _COARSE), self._middle.get(middle), self._fine.get(kind)):
            if known is not None:
                chance = (known[0] + WEIGHT * chance) / (known[1] + WEIGHT)
        self._cache[kind] = chance
        return chance

    @property
    def trust(self) -> float:
        """Return accepted over expected tokens of recent drafts, at most 1. The likeliest of several offers tends to be
        overestimated, and rejections come in clusters."""
        return min(1.0, self._accepted / self._expected)

    def record_draft(self, expected: float, accepted: int) -> None:
        """Learn from a draft of which `expected` tokens were expected and `accepted` accepted."""
        if not expected:
            self.record_nothing(1)
            return
        self._expected = DECAY * self._expected + expected
        self._accepted = DECAY * self._accepted + accepted

    def record_nothing(self, rounds: int) -> None:
        """Record so many rounds without a draft: distrust fades."""
        self._accepted += (1.0 - DECAY**rounds) * (self._expected - self._accepted)

    def learn(self, kind: int, accepted: bool) -> None:
        """Learn whether a token of this kind was accepted."""
        self._cache.clear()
        for seen, key in ((self._coarse, kind & _COARSE), (self._middle, kind & _MIDDLE), (self._fine, kind)):
            known = seen.get(key)
            if known is None:
                seen[key] = [float(accepted), 1.0]
                continue
            known[0] += accepted
            known[1] += 1.0
            if known[1] > HALVED_AT:
                known[0] *= 0.5
                known[1] *= 0.5

    def _prior(self, middle: int) -> float:
        agree, match, level = middle >> _AGREE_BIT, middle >> _MATCH_BIT & 15, middle >> _SHARE_BIT & 3
        best = max(prior for bit, prior in enumerate(self._priors) if agree >> bit & 1)
        if not match:  # offered for its place alone
            best *= 0.2
        return (best + (1.0 - best) * match / (MAX_MATCH + 2.0)) * (0.4, 0.7, 1.0)[level]

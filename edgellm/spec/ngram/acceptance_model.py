"""The chance that a retrieved token is accepted, learned from the verdicts on earlier ones.

A token's evidence is which sources offer it and which offer another, how many tokens before it were matched, how often
it follows there, and whether it continues a word: within a word a copy is nearly sure to go on, at its end it often
deviates. Evidence is looked up for every token that is offered, so it is one number.
"""

from __future__ import annotations

from collections.abc import Sequence

DEEP = 8
"""Matches of this many tokens and more are one kind."""
WEIGHT = 2.0
"""Tries that the chance of a coarser kind counts for."""
FADES = 400.0
"""Tries of one kind that are remembered; then old ones count less."""
TRUSTED = 16.0
"""Tokens, all as expected, that new chances start with."""
RECALLED = 0.98
"""Weight of a draft after each later one in the trust in chances."""

_OFTEN, _DEEP, _AGREE, _DIFFER = 1, 3, 7, 15  # the bit at which each begins; bit 0: within a word
_MIDDLE = (1 << _DIFFER) - 1  # all but the sources that differ
_COARSE = _MIDDLE & ~((1 << _AGREE) - 1) | 1  # the sources that agree, and whether it is within a word


def evidence(agree: int, differ: int, matched: int, share: float, inside: bool) -> int:
    """Return a token's evidence as one number. `agree`, `differ`: bit masks of the sources (eight at most) that
    offer it, and of those that offer another token; the rest as in `OfferedModel`."""
    often = 2 if share > 0.8 else 1 if share > 0.4 else 0
    deep = min(DEEP, matched)
    return differ << _DIFFER | agree << _AGREE | deep << _DEEP | often << _OFTEN | inside


def agrees(kind: int) -> int:
    """Return the bit mask of the sources that offer a token, from its evidence."""
    return (kind & _MIDDLE) >> _AGREE


class AcceptanceModel:
    """Running acceptance by kind of evidence; rarely seen kinds fall back on coarser ones."""

    def __init__(self, priors: Sequence[float]) -> None:
        """Start from `priors[i]`, the chance of a token that only source i offers, before anything was seen."""
        self._priors = tuple(priors)
        self._unseen: dict[int, float] = {}  # chances before anything was seen
        self._coarse: dict[int, list[float]] = {}  # hits and tries, as in the next two dictionaries
        self._middle: dict[int, list[float]] = {}
        self._fine: dict[int, list[float]] = {}
        self._now: dict[int, float] = {}  # cache of chances since something was last learned
        self._expected = self._came = TRUSTED  # drafted tokens that were expected to be accepted, and that were

    def of(self, kind: int) -> float:
        """Return the chance in (0, 1) that the verifier accepts a token of this kind, given that it has accepted
        those before it."""
        now = self._now.get(kind)
        if now is not None:
            return now
        middle = kind & _MIDDLE
        chance = self._unseen.get(middle)
        if chance is None:
            chance = self._unseen[middle] = self._prior(middle)
        for known in (self._coarse.get(kind & _COARSE), self._middle.get(middle), self._fine.get(kind)):
            if known is not None:
                chance = (known[0] + WEIGHT * chance) / (known[1] + WEIGHT)
        self._now[kind] = chance
        return chance

    @property
    def trust(self) -> float:
        """Return how many tokens were accepted per expected token of recent drafts, at most 1. The likeliest of
        several offers tends to be the one whose chance is overestimated; and where one token fails the next ones do."""
        return min(1.0, self._came / self._expected)

    def judged(self, expected: float, came: int) -> None:
        """Learn from a draft of which `expected` tokens were expected and `came` accepted; without a draft, distrust
        fades."""
        if not expected:
            self._came += (1.0 - RECALLED) * (self._expected - self._came)
            return
        self._expected = RECALLED * self._expected + expected
        self._came = RECALLED * self._came + came

    def learn(self, kind: int, accepted: bool) -> None:
        """Learn whether a token of this kind was accepted."""
        self._now.clear()
        for seen, key in ((self._coarse, kind & _COARSE), (self._middle, kind & _MIDDLE), (self._fine, kind)):
            known = seen.get(key)
            if known is None:
                seen[key] = [float(accepted), 1.0]
                continue
            known[0] += accepted
            known[1] += 1.0
            if known[1] > FADES:
                known[0] *= 0.5
                known[1] *= 0.5

    def _prior(self, middle: int) -> float:
        agree, deep, often = middle >> _AGREE, middle >> _DEEP & 15, middle >> _OFTEN & 3
        best = max(prior for bit, prior in enumerate(self._priors) if agree >> bit & 1)
        if not deep:  # offered for its place alone
            best *= 0.2
        return (best + (1.0 - best) * deep / (DEEP + 2.0)) * (0.4, 0.7, 1.0)[often]

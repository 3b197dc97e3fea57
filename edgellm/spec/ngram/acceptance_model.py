"""How likely a retrieved token is to be accepted, learned from what became of earlier ones.

A token's evidence is which sources offer it and which offer another, how many tokens before it were matched, how often
it follows there, and whether it goes on with a word: within a word a copy is nearly sure to go on, at its end it often
leaves. It is looked up for every token that is offered, so it is one number.
"""

from __future__ import annotations

from collections.abc import Sequence

DEEP = 8
"""Matches of so many tokens and more are one kind."""
WEIGHT = 2.0
"""Tries that the opinion of a coarser kind is worth."""
FADES = 400.0
"""Tries of one kind that are remembered; then old ones count less."""
TRUSTED = 16.0
"""Tokens as expected that new chances are worth."""
RECALLED = 0.98
"""What a draft counts for the next one in how far chances are trusted."""

_OFTEN, _DEEP, _AGREE, _DIFFER = 1, 3, 7, 15  # the bit at which each begins; bit 0: within a word
_MIDDLE = (1 << _DIFFER) - 1  # all but who differs
_COARSE = _MIDDLE & ~((1 << _AGREE) - 1) | 1  # who agrees, and whether it is within a word


def evidence(agree: int, differ: int, matched: int, share: float, inside: bool) -> int:
    """What speaks for a token. `agree`, `differ`: bit masks of the sources (eight at most) that offer it, and of those
    that offer another one; the rest as in `Offer`."""
    often = 2 if share > 0.8 else 1 if share > 0.4 else 0
    deep = min(DEEP, matched)
    return differ << _DIFFER | agree << _AGREE | deep << _DEEP | often << _OFTEN | inside


def agrees(kind: int) -> int:
    """The bit mask of the sources that offer a token, of its evidence."""
    return (kind & _MIDDLE) >> _AGREE


class Chances:
    """Running acceptance by kind of evidence; kinds that were seldom seen lean on coarser ones."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors[i]` is the chance of a token that only source i offers, before anything was seen."""
        self._priors = tuple(priors)
        self._unseen: dict[int, float] = {}  # chances before anything was seen
        self._coarse: dict[int, list[float]] = {}  # hits and tries, as in the next two
        self._middle: dict[int, list[float]] = {}
        self._fine: dict[int, list[float]] = {}
        self._now: dict[int, float] = {}  # chances that were asked for since something was learned
        self._expected = self._came = TRUSTED  # tokens of drafts that were expected, and that came

    def of(self, kind: int) -> float:
        """The chance in (0, 1) that the verifier accepts a token of such evidence, where it has accepted those before
        it."""
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
        """What came of each expected token of the drafts of late, at most 1. The likeliest of several offers is the one
        whose chance is estimated too high, more often than not; and where one fails the next ones do."""
        return min(1.0, self._came / self._expected)

    def judged(self, expected: float, came: int) -> None:
        """A draft of which so many tokens were expected had so many accepted; where there was none, what is held
        against drafts fades."""
        if not expected:
            self._came += (1.0 - RECALLED) * (self._expected - self._came)
            return
        self._expected = RECALLED * self._expected + expected
        self._came = RECALLED * self._came + came

    def learn(self, kind: int, accepted: bool) -> None:
        """What became of such a token."""
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

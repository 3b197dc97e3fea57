"""How likely a retrieved token is to be accepted, learned from what became of earlier ones.

A token's evidence is which sources offer it and which offer another, how many tokens before it were matched, how often
it follows there, and whether it goes on with a word: within a word a copy is nearly sure to go on, at its end it often
leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DEEP = 8
"""Matches of so many tokens and more are one kind."""
WEIGHT = 2.0
"""Tries that the opinion of a coarser kind is worth."""
FADES = 400.0
"""Tries of one kind that are remembered; then old ones count less."""


class Evidence(NamedTuple):
    """What speaks for a token: bit masks of the sources that offer it, and of those that offer another one."""

    agree: int
    differ: int
    matched: int
    share: float
    inside: bool


class Chances:
    """Running acceptance by kind of evidence; kinds that were seldom seen lean on coarser ones."""

    def __init__(self, priors: Sequence[float]) -> None:
        """`priors[i]` is the chance of a token that only source i offers, before anything was seen."""
        self._priors = tuple(priors)
        self._unseen: dict[tuple[int, int, int], float] = {}  # chances before anything was seen
        self._seen: dict[tuple[int, ...], list[float]] = {}  # hits and tries
        self._now: dict[tuple[int, ...], float] = {}  # chances that were asked for since something was learned

    def of(self, evidence: Evidence) -> float:
        """The chance in (0, 1) that the verifier accepts the token, where it has accepted those before it."""
        coarse, middle, fine = _kinds(evidence)
        now = self._now.get(fine)
        if now is not None:
            return now
        unseen = agree, deep, often = middle[:3]
        chance = self._unseen.get(unseen)
        if chance is None:
            chance = self._unseen[unseen] = self._prior(agree, deep, often)
        for kind in (coarse, middle, fine):
            known = self._seen.get(kind)
            if known is not None:
                chance = (known[0] + WEIGHT * chance) / (known[1] + WEIGHT)
        self._now[fine] = chance
        return chance

    def learn(self, evidence: Evidence, accepted: bool) -> None:
        """What became of such a token."""
        self._now.clear()
        for kind in _kinds(evidence):
            known = self._seen.get(kind)
            if known is None:
                self._seen[kind] = [float(accepted), 1.0]
                continue
            known[0] += accepted
            known[1] += 1.0
            if known[1] > FADES:
                known[0] *= 0.5
                known[1] *= 0.5

    def _prior(self, agree: int, deep: int, often: int) -> float:
        best = max(prior for bit, prior in enumerate(self._priors) if agree >> bit & 1)
        if not deep:  # offered for its place alone
            best *= 0.2
        return (best + (1.0 - best) * deep / (DEEP + 2.0)) * (0.4, 0.7, 1.0)[often]


def _kinds(evidence: Evidence) -> tuple[tuple[int, bool], tuple[int, int, int, bool], tuple[int, int, int, int, bool]]:
    """The kinds it belongs to, the coarsest first."""
    agree, differ, matched, share, inside = evidence
    deep = min(DEEP, matched)
    often = 2 if share > 0.8 else 1 if share > 0.4 else 0
    return (agree, inside), (agree, deep, often, inside), (agree, differ, deep, often, inside)

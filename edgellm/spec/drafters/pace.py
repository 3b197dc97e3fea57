"""A choice between two ways to write, by the tokens per second that either wrote lately."""

from __future__ import annotations

from edgellm.spec.draft_length import EXPLORATION
from edgellm.spec.drafters.hybrid import RoundMean


class PaceChoice:
    """Compares a first way to write with a second one, which is the better at first sight. After `trials` of each the
    faster one is used; the other is tried again once `EXPLORATION` of the time pays for that."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._ways = RoundMean(), RoundMean()
        self._saved = 0.0  # seconds for a trial of the slower way

    def second(self) -> bool:
        """Return whether to use the second way next."""
        first, second = self._ways
        if min(first.rounds, second.rounds) < self._trials:
            return second.rounds <= first.rounds
        faster = second.pace <= first.pace
        other = self._ways[not faster]
        if self._saved > max(0.0, other.seconds - other.tokens * self._ways[faster].pace):
            self._saved = 0.0
            return not faster
        return faster

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that a way wrote `tokens` in `seconds`."""
        self._ways[second].add(tokens, seconds)
        self._saved += EXPLORATION * seconds

    @property
    def paces(self) -> tuple[float, float]:
        """Return the seconds per token of both ways; 0 where nothing is known."""
        return self._ways[0].pace, self._ways[1].pace

"""How fast tokens were written lately, and what follows for the next ones: which way to write, and when to draft."""

from __future__ import annotations

from edgellm.spec.draft_length import EXPLORATION

_MIN_WEIGHT = 0.1  # weight of the last round, stretch or reply, once there are many
_MAX_PAUSE = 63  # rounds without a draft


class RoundMean:
    """The mean tokens and seconds of the latest rounds of one kind."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: float, seconds: float, rounds: int = 1) -> None:
        """Add so many rounds of `tokens` and `seconds` each."""
        self.rounds += rounds
        weight = max(1.0 - (1.0 - _MIN_WEIGHT) ** rounds, rounds / self.rounds)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def pace(self) -> float:
        """Return the seconds per token; 0 if nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0


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


class BackOff:
    """Pauses a drafter whose drafts are dropped because they do not pay: for more and more rounds, until one is used.

    A cost curve that was measured on a busy machine can say that drafting pays and that no draft does, and is not
    corrected by rounds with another drafter.
    """

    def __init__(self) -> None:
        self._dropped = 0  # drafts in a row
        self._pause = 0  # rounds without a draft that are left

    @property
    def pauses(self) -> bool:
        """Return whether nothing is to be drafted in this round."""
        return self._pause > 0

    def record(self, used: bool | None) -> None:
        """Record a round: whether its draft was used, None if nothing was drafted."""
        if used is None:
            self.rest(1)
            return
        self._dropped = 0 if used else self._dropped + 1
        self._pause = min(2**self._dropped - 1, _MAX_PAUSE)

    def rest(self, rounds: int) -> None:
        """Record so many rounds in which nothing was drafted."""
        self._pause = max(0, self._pause - rounds)

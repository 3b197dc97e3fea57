"""A two-armed bandit over ways to write: it uses the faster arm, and tries the other within an allowance."""

from __future__ import annotations

EXPLORATION = 0.004
"""Share of the time for tries of one source: with three sources, replies stay within 1.5 % of plain decoding."""
LEAST_WEIGHT = 0.1
"""Weight of the latest round in the mean of a way to write, once there are many."""


class Arm:
    """An arm of a bandit: the mean tokens and seconds of its latest rounds."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a round."""
        self.rounds += 1
        weight = max(LEAST_WEIGHT, 1.0 / self.rounds)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def pace(self) -> float:
        """Return the seconds per token; 0 if nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0


class Bandit:
    """A two-armed bandit by seconds per token, whose second arm comes first. After `trials` of each arm it uses the
    faster one, and tries the other once `EXPLORATION` of the time pays for that."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self.arms = Arm(), Arm()
        self._saved = 0.0  # seconds that a try of the slower arm may cost

    def second(self, cost: float = 0.0) -> bool:
        """Return whether to use the second arm next, whose try takes `cost` seconds more than its rounds."""
        first, second = self.arms
        if min(first.rounds, second.rounds) < self._trials:
            return second.rounds <= first.rounds
        faster = second.pace <= first.pace
        other, pace = self.arms[not faster], self.arms[faster].pace
        if self._saved > max(0.0, other.seconds - other.tokens * pace) + (0.0 if faster else cost):
            self._saved = 0.0
            return not faster
        return faster

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that an arm wrote `tokens` in `seconds`."""
        self.arms[second].add(tokens, seconds)
        self._saved += EXPLORATION * seconds

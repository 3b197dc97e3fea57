"""A bandit over two ways to write: the faster one is used, the other is tried within an allowance."""

from __future__ import annotations

from edgellm.spec.drafting.tuning import TUNING


class Arm:
    """One way to write: the mean tokens and seconds of its latest rounds."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a round."""
        self.rounds += 1
        weight = max(TUNING.least_weight, 1.0 / self.rounds)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def pace(self) -> float:
        """Return the seconds per token; 0 if nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0

    def loss(self, pace: float) -> float:
        """Return the seconds that a round takes longer than its tokens would at another pace."""
        return max(0.0, self.seconds - self.tokens * pace)


class Bandit:
    """Chooses between two ways to write, of which the second is the better at first sight. After `trials` of each the
    faster one is used; the other is tried again once `Tuning.exploration` of the time pays for that."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self.arms = Arm(), Arm()
        self._saved = 0.0  # seconds that may go into a try of the slower way

    def second(self, cost: float = 0.0) -> bool:
        """Return whether to use the second way next, where a try of it takes `cost` seconds longer than others did."""
        first, second = self.arms
        if min(first.rounds, second.rounds) < self._trials:
            return second.rounds <= first.rounds
        faster = second.pace <= first.pace
        if self._saved > self.arms[not faster].loss(self.arms[faster].pace) + (0.0 if faster else cost):
            self._saved = 0.0
            return not faster
        return faster

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that a way wrote `tokens` in `seconds`."""
        self.arms[second].add(tokens, seconds)
        self._saved += TUNING.exploration * seconds

"""A bandit over two ways to write: the faster one is used, the other is tried within an allowance; and its constants,
with those of the draft policy, which is a bandit over more of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of choosing, each with its unit and its reason."""

    exploration: float = 0.004
    """Share of the time for tries of one source: with three sources, replies stay within 1.5 % of plain decoding."""
    memory: float = 0.98
    """Weight of each round in the price of a token after the next one: a memory of about fifty rounds."""
    least_weight: float = 0.1
    """Weight of the latest round in the mean of a way to write, once there are many."""
    least_gain: float = 0.02
    """Tokens that a draft has to bring beyond its cost: no curve is measured more exactly than that."""

    model_trials: int = 4
    """Rounds with a draft model before it is judged: fewer are too few for its mean."""
    first_draft: int = 4
    """Tokens of a draft model's first draft: trying a useless model is to cost little."""
    stretch: int = 64
    """Tokens, or a reply, that are written with the draft model or without, before that is decided again."""
    stretch_trials: int = 2
    """Stretches of either kind before the faster kind is chosen: single ones differ by luck."""
    reply_tokens: float = 40.0
    """Tokens of a reply that are expected before the first one has ended."""


@dataclass(frozen=True, slots=True)
class Copying:
    """The constants of copies, each with its unit and its reason. "Decodes" are decodes of one row."""

    first_credit: float = 0.8
    """Decodes that may go into copies before any was right, and are saved up again: about four short drafts."""
    doubt_credit: float = 8.0
    """The same where the curve is doubtful, and longer decodes have to be tried before anything can be said."""
    least_credit: float = 8.0
    """Decodes that may be spent on copies after one that was right, at least: where one is, more are."""
    most_credit: float = 16.0
    """Decodes that right copies have saved and may be spent on further ones, at most: about one long wrong draft."""
    debt: float = 0.3
    """Decodes by which a lookup may overdraw the credit where the latest tokens have stood in the text before."""
    free_draft: float = 0.5
    """Decodes that a copy may always cost if they are there: two or three tokens, which show whether more will pay."""
    most_loss: float = 2.0
    """Decodes of a loss that are believed: it is estimated by a curve, which may be wrong."""
    known_tokens: int = 3
    """Tokens in a row that are known from before, from which on a lookup is likely to find what follows."""
    lookup: float = 5e-5
    """Seconds that a lookup takes, until some were timed."""
    interrupted: float = 2.0
    """Times as long as usual that a lookup or a decode takes at most, unless something interrupted it."""


TUNING, COPYING = Tuning(), Copying()


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

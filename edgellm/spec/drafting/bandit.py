"""A two-armed bandit over ways to write: it uses the faster arm, and tries the other within an allowance; and the
constants of this bandit and of the draft policy."""

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
    """Tokens written with the draft model or without before that is decided again; a reply's end decides earlier."""
    stretch_trials: int = 2
    """Stretches of either kind before the faster kind is chosen: single ones differ by luck."""
    reply_tokens: float = 40.0
    """Expected tokens of a reply before the first reply has ended."""


@dataclass(frozen=True, slots=True)
class Copying:
    """The constants of copies, each with its unit and its reason. "Decodes" are decodes of one row."""

    first_credit: float = 0.8
    """Decodes that copies may cost before any was right, and are saved up again: about four short drafts."""
    doubt_credit: float = 8.0
    """The same under a doubtful curve, where longer decodes have to be tried first."""
    least_credit: float = 8.0
    """Least decodes that may be spent on copies after a right copy: right copies come in clusters."""
    most_credit: float = 16.0
    """Most decodes saved by right copies that further copies may cost: about one long wrong draft."""
    debt: float = 0.3
    """Decodes by which a lookup may overdraw the credit where the latest tokens have stood in the text before."""
    free_draft: float = 0.5
    """Decodes that a copy may always cost if they are left: two or three tokens, which show whether more will pay."""
    most_loss: float = 2.0
    """Most decodes that count of a loss: the curve that it is estimated by may be wrong."""
    known_tokens: int = 3
    """Repeated tokens in a row from which on a lookup is likely to find the next token."""
    lookup: float = 5e-5
    """Seconds that a lookup takes, until some were timed."""
    interrupted: float = 2.0
    """Longer lookups than this times the usual were interrupted, and count as this."""


TUNING, COPYING = Tuning(), Copying()


class Arm:
    """An arm of a bandit: the mean tokens and seconds of its latest rounds."""

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
    """A two-armed bandit by seconds per token, whose second arm comes first. After `trials` of each arm it uses the
    faster one, and tries the other once `Tuning.exploration` of the time pays for that."""

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
        if self._saved > self.arms[not faster].loss(self.arms[faster].pace) + (0.0 if faster else cost):
            self._saved = 0.0
            return not faster
        return faster

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that an arm wrote `tokens` in `seconds`."""
        self.arms[second].add(tokens, seconds)
        self._saved += TUNING.exploration * seconds

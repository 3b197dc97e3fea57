"""The choice between rounds with a draft model and without it: a bandit over stretches of replies."""

from __future__ import annotations

from math import ceil

from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.types import Chunk

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

    @property
    def second_loses(self) -> bool:
        """Return whether the second arm is known to be slower, by more than single rounds differ."""
        first, second = self.arms
        return min(first.rounds, second.rounds) >= self._trials and second.pace > 1.05 * first.pace

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that an arm wrote `tokens` in `seconds`."""
        self.arms[second].add(tokens, seconds)
        self._saved += EXPLORATION * seconds


class ModelArm:
    """The choice of a draft model, by the means of rounds with it, of its drafts, and of its reading of prompts. Whole
    stretches of replies are compared, because its text can no longer be copied, which might have been faster."""

    first_draft = 4
    """Tokens of the first draft: trying a useless model is to cost little."""
    _rounds_tried = 4  # rounds with a draft model before it is judged: fewer are too few for its mean
    _stretch_tokens = 64  # tokens with or without the draft model before that is decided again, at the latest

    def __init__(self) -> None:
        self.rounds, self.drafts, self.reading = Arm(), Arm(), Arm()
        self.acceptance = ConfidenceAcceptance()
        self.stretches = Bandit(2)  # stretches of replies without the draft model, and with it: single ones differ
        self._first = 0, 0, 0.0  # tokens of a prompt and of its first draft, and seconds of both together
        self.begin(0)

    def begin(self, prompt: int) -> None:
        """Begin a reply to `prompt` tokens."""
        self._unread: int | None = prompt  # tokens that the model has to read before it can draft; None: it has drafted
        self._reads_prompt = self.asked = False
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        """Decide whether the draft model is asked in the next stretch."""
        self.uses_model = self.stretches.second(self.reading_seconds)
        without, with_model = (arm.pace for arm in self.stretches.arms)
        self._explores = with_model >= without
        self.trials, self._tokens, self._seconds = 0, 0, 0.0  # rounds of this stretch with the model, and all of it

    def end_stretch(self) -> None:
        """End the stretch, or the reply."""
        if self._tokens:
            self.stretches.record(self.uses_model, self._tokens, self._seconds)

    @property
    def most(self) -> int:
        """Return the longest draft: twice the mean tokens of a round."""
        return ceil(2.0 * self.rounds.tokens) if self.rounds.rounds else self.first_draft

    @property
    def reading_seconds(self) -> float:
        """Return the seconds that the draft model takes to read the text before it can draft."""
        return (self._unread or 0) * self.reading.pace

    def tries(self) -> bool:
        """Return whether rounds with the draft model are too few to judge, or are to be judged anew in this stretch."""
        if self.rounds.rounds < self._rounds_tried:
            return True
        return not self.trials and (self._explores or self._unread is None)

    def repays(self, left: float, pace: float) -> bool:
        """Return whether the draft model will save more time in the next `left` tokens, which take `pace` seconds each
        without it, than it takes to read the text."""
        return self._unread is None or left * (pace - self.rounds.pace) > self.reading_seconds

    def delays(self) -> bool:
        """Return whether reading the prompt first would delay the first token by more than a round with the draft
        model, which is the possible saving."""
        return not self.rounds.rounds or self.reading_seconds > self.rounds.seconds

    def drafted(self, tokens: int, seconds: float, *, first: bool, while_waiting: bool = False) -> None:
        """Record a draft that took `seconds`, reading of the text included. The time of the `first` round is not
        counted otherwise. `while_waiting`: the model has only read the prompt while the verifier did."""
        prompt, self._unread = self._unread or 0, None
        self.asked, self._reads_prompt = not while_waiting, prompt > 0 and not while_waiting
        self._seconds += seconds if first else 0.0
        if prompt and not self.drafts.rounds:
            self._first = prompt, tokens, seconds  # The next draft tells the share of the draft.
            return
        if not prompt:
            self.drafts.add(tokens, seconds)
            (prompt, tokens, seconds), self._first = self._first, (0, 0, 0.0)
        if prompt:
            self.reading.add(prompt, max(0.0, seconds - tokens * self.drafts.pace))

    def observe(self, chunk: Chunk, accepted: int, tokens: int, seconds: float, *, first: bool) -> None:
        """Learn from a round of `seconds` that wrote `tokens`; the `first` one's time includes the prompt's."""
        if self._unread is not None:
            self._unread += tokens
        self.trials += self.asked
        if self.asked:
            self.acceptance.observe(chunk, accepted)
        if not first:
            self._tokens += tokens
            self._seconds += seconds
            if self.asked:
                if not self._reads_prompt:
                    self.rounds.add(tokens, seconds)
                self._reads_prompt = False
        self.asked = False
        if self._tokens >= self._stretch_tokens:
            self.end_stretch()
            self._begin_stretch()

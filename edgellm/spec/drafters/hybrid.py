"""Hybrid drafting: retrieval first, and the small model where retrieval has nothing better to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from edgellm.spec.draft_length import EXPLORED
from edgellm.spec.drafters.acceptance import Acceptance
from edgellm.spec.drafters.parallel import first
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Round

TRIED = 4
"""Rounds with the small model that are needed to judge its worth."""
_SELDOM = 64  # rounds without the small model, before it is tried once more
STRETCH = 64
"""Tokens, or a reply, that are written with the small model or without, before that is decided again."""
_BOTH = 1  # stretches of either kind that are needed to decide
_FEW = 0.1  # weight of the last round, stretch or reply, once there are many
_REPLY = 40.0  # tokens of a reply, until one is known


class DrafterSelector:
    """The tokens and times of the latest rounds with and without the small model, and the acceptance of its tokens;
    kept from reply to reply."""

    def __init__(self) -> None:
        self._with, self._without, self._drafting, self._reading = RoundMean(), RoundMean(), RoundMean(), RoundMean()
        self._stretches = RoundMean(), RoundMean()  # without the small model, and with it
        self._tokens, self._seconds = 0, 0.0  # written in the stretch under way
        self._to_spend = 0.0  # seconds that a stretch of the other kind may cost by now
        self.uses = True
        """True if the small model is asked at all in this stretch."""
        self._others = 0  # rounds without the small model since it was used last
        self._spare = 0.0  # seconds that a try may cost by now
        self._length = _REPLY  # mean tokens of a reply
        self.acceptance = Acceptance()

    def stretch(self) -> None:
        """Begin a stretch: with the small model, if stretches with it took less time per token. Whole stretches are
        compared: what the small model writes cannot be copied any more, and copying might have been quicker still."""
        if self._tokens:
            self._stretches[self.uses].add(self._tokens, self._seconds)
            self._to_spend += EXPLORED * self._seconds
        self._tokens, self._seconds = 0, 0.0
        without, with_it = self._stretches
        if min(without.rounds, with_it.rounds) < _BOTH:
            self.uses = with_it.rounds <= without.rounds
            return
        self.uses = with_it.pace <= without.pace
        cost = abs(with_it.pace - without.pace) * self._stretches[not self.uses].tokens
        if self._to_spend > cost:
            self._to_spend = 0.0
            self.uses = not self.uses

    def wrote(self, tokens: int, seconds: float) -> None:
        """Count `tokens` written in `seconds` towards this stretch."""
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens >= STRETCH:
            self.stretch()

    def due(self, prompt: int = 0) -> bool:
        """Return whether too little is known of recent rounds with the small model, and there is time to find out,
        including for the `prompt` tokens that it has to read first."""
        if self._with.rounds < TRIED:
            return True
        loss = self._with.seconds - self._with.tokens * self._without.pace
        return self._others >= _SELDOM and self._spare >= prompt * self._reading.pace + max(0.0, loss)

    @property
    def usual(self) -> tuple[float, float]:
        """Return the tokens of a round with the small model, and the seconds for them."""
        return self._with.tokens, self._with.seconds

    def worth_reading(self, prompt: int, written: int) -> bool:
        """Return whether the small model, which has not read the `prompt` tokens of a reply, will save more time
        than reading them takes, after `written` tokens of the reply."""
        left = max(self._length - written, 0.0)
        return left * (self._without.pace - self._with.pace) > prompt * self._reading.pace

    def drafted(self, seconds: float, prompt: int) -> None:
        """Take in that the small model took `seconds` for a draft, for which it read `prompt` tokens first."""
        if not prompt:
            self._drafting.add(1, seconds)
        elif self._drafting.rounds:
            self._reading.add(prompt, max(0.0, seconds - self._drafting.seconds))

    def took(self, tokens: int, seconds: float) -> None:
        """Take in that a round with the small model brought `tokens` in `seconds`."""
        self._others, self._spare = 0, 0.0
        self._with.add(tokens, seconds)

    def other(self, tokens: int, seconds: float) -> None:
        """Take in that a round without the small model brought `tokens` in `seconds`."""
        self._others += 1
        self._spare += EXPLORED * seconds
        self._without.add(tokens, seconds)

    def ended(self, written: int) -> None:
        """Take in the length of a complete reply."""
        self._length += _FEW * (written - self._length)


class RoundMean:
    """The mean tokens and seconds of the latest rounds of one kind."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: int, seconds: float) -> None:
        weight = max(_FEW, 1.0 / (self.rounds + 1.0))
        self.rounds += 1
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def pace(self) -> float:
        """Return the seconds per token; 0 if nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0


_RESTS = "the small model rests: replies took longer with it of late"


class HybridDrafter(Drafter):
    """A drafter that copies where that lately brought more tokens for its time than asking the small model."""

    def __init__(
        self, retrieval: RetrievalDrafter, model: Drafter, gamma: int, rounds: DrafterSelector | None = None
    ) -> None:
        """Let the model draft at most `gamma` tokens; retrieval may draft more. `rounds` come from earlier replies."""
        self._retrieval, self._model, self._gamma = retrieval, model, gamma
        self._rounds = rounds or DrafterSelector()
        self._number = 0  # of the round
        self._reads = self._knows = False  # whether the small model reads the prompt this time, or knows it already
        self.asked = False
        """True if the small model drafted last time, even if none of its tokens paid."""

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`."""
        self._number, self._reads, self._knows = 0, False, False
        self._retrieval.begin(state)
        self._model.begin(state)

    def end(self) -> None:
        """See `Drafter.end`."""
        self._model.end()

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`."""
        rounds, prompt, written = self._rounds, state.prompt_tokens, state.written
        if not self._number:
            rounds.stretch()
        self.asked = False
        if not rounds.uses:
            chunk = self._retrieval.propose(state, gamma)
            return replace(chunk, reason=f"{chunk.reason}; {_RESTS}") if chunk.reason and not len(chunk) else chunk
        due = rounds.due(0 if self._knows else prompt + written)
        asks = self._knows or due or rounds.worth_reading(prompt + written, written)
        chunk = self._retrieval.propose(state, gamma, instead=None if due else rounds.usual)
        pays = due or self._retrieval.pays(rounds.usual)
        now = due and self._number > 0  # the first round's time includes the verifier's prompt
        self.asked = asks and (now or (pays and not len(chunk)))
        if not self.asked:
            return chunk
        self._reads, self._knows = not self._knows, True
        began = perf_counter()
        drafted = self._model.propose(state, min(gamma, self._gamma))
        took = perf_counter() - began
        rounds.drafted(took, prompt if self._reads else 0)
        if not self._number:
            rounds.wrote(0, took)
        if len(drafted) and drafted.distributions is None:
            drafted = self._paying(drafted, gamma)
        if not chunk.reason:
            return drafted
        behind = f", and {drafted.tail} tokens are copied behind it" if drafted.tail else ""
        return replace(drafted, reason=f"{chunk.reason}; the small model drafts{behind}")

    def _paying(self, drafted: Chunk, gamma: int) -> Chunk:
        """Return as much of a draft as pays, with what may be copied behind it."""
        survives = self._rounds.acceptance.survives(drafted.confidence.tolist())
        n = self._retrieval.worth(survives)
        return first(drafted, n) if n < len(drafted) else self._retrieval.behind(drafted, gamma, survives[-1])

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """See `Drafter.look_ahead`. Behind a retrieved chunk there is nothing to guess with."""
        if not chunk.retrieved:
            self._model.look_ahead(state, chunk, min(gamma, self._gamma), until)

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """See `Drafter.unverified`: what the small model drafted, or drafts now."""
        if chunk.retrieved or not len(chunk):
            return self._model.propose(state, min(gamma, self._gamma))
        return first(chunk, len(chunk) - chunk.tail)

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Drafter.observe`."""
        self._model.observe(state, turn)
        self._retrieval.observe(state, turn, shared=self.asked)
        if (verdict := turn.verdict) is None:
            return
        tokens = verdict.accepted + len(verdict.tokens)
        self._rounds.acceptance.told(turn.chunk, verdict.accepted)
        if self._number and not self._reads:  # else the time includes a prompt
            (self._rounds.took if self.asked else self._rounds.other)(tokens, turn.seconds)
        if self._number:
            self._rounds.wrote(tokens, turn.seconds)
        self._number += 1
        self._reads = False

    def close(self) -> None:
        self._model.close()

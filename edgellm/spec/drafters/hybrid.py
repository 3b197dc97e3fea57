"""Hybrid drafting: retrieval first, and the draft model where retrieval offers nothing better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from edgellm.spec.draft_length import EXPLORATION
from edgellm.spec.drafters.acceptance import Acceptance
from edgellm.spec.drafters.pace import BackOff, RoundMean
from edgellm.spec.drafters.parallel import truncated
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Round

MIN_ROUNDS = 4
"""Rounds with the small model that are needed to judge its worth."""
FIRST_DRAFT = 4
"""Tokens of a draft of the small model, at most, before any are accepted."""
_TRY_EVERY = 64  # rounds without the small model, before it is tried once more
EPISODE = 64
"""Tokens, or a reply, that are written with the small model or without, before that is decided again."""
_MIN_EPISODES = 1  # stretches of either kind that are needed to decide
_MIN_WEIGHT = 0.1  # weight of the last reply, once there are many
_REPLY_TOKENS = 40.0  # tokens of a reply, before the first is known


class DrafterSelector:
    """Compares recent rounds with and without the draft model by tokens and time; kept from reply to reply."""

    def __init__(self) -> None:
        self._model_rounds, self._other_rounds, self._drafting, self._prefill = (
            RoundMean(),
            RoundMean(),
            RoundMean(),
            RoundMean(),
        )
        self._episodes = RoundMean(), RoundMean()  # without the small model, and with it
        self._tokens, self._seconds = 0, 0.0  # written in the current episode
        self._switch_budget = 0.0  # seconds available for an episode of the other kind
        self.uses_model = True
        """True if the draft model is used at all in this episode."""
        self._rounds_since = 0  # rounds without the small model since it was used last
        self._try_budget = 0.0  # seconds available for a trial
        self._first_prompt = 0, 0.0  # tokens and seconds of the first draft behind a prompt
        self._length = _REPLY_TOKENS  # mean tokens of a reply
        self.acceptance = Acceptance()
        self.back_off = BackOff()
        self.longest = FIRST_DRAFT
        """Tokens of a draft of the model, at most: more and more of them, so that trying a useless model costs
        little."""

    def start_episode(self) -> None:
        """Begin an episode, with the draft model if episodes with it took less time per token.

        Whole episodes are compared: text that the draft model writes can no longer be copied, which might have been
        faster.
        """
        if self._tokens:
            self._episodes[self.uses_model].add(self._tokens, self._seconds)
            self._switch_budget += EXPLORATION * self._seconds
        self._tokens, self._seconds = 0, 0.0
        without_model, with_model = self._episodes
        if min(without_model.rounds, with_model.rounds) < _MIN_EPISODES:
            self.uses_model = with_model.rounds <= without_model.rounds
            return
        self.uses_model = with_model.pace <= without_model.pace
        cost = abs(with_model.pace - without_model.pace) * self._episodes[not self.uses_model].tokens
        if self._switch_budget > cost:
            self._switch_budget = 0.0
            self.uses_model = not self.uses_model

    def record_tokens(self, tokens: int, seconds: float) -> None:
        """Count `tokens` written in `seconds` towards this episode."""
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens >= EPISODE:
            self.start_episode()

    def try_due(self, prompt: int = 0) -> bool:
        """Return whether recent rounds with the draft model are too few to judge, and there is time for a trial,
        including reading the `prompt` tokens first."""
        if self._model_rounds.rounds < MIN_ROUNDS:
            return True
        loss = self._model_rounds.seconds - self._model_rounds.tokens * self._other_rounds.pace
        return self._rounds_since >= _TRY_EVERY and self._try_budget >= prompt * self._prefill.pace + max(0.0, loss)

    @property
    def model_round(self) -> tuple[float, float]:
        """Return the tokens of a round with the draft model, and its seconds."""
        return self._model_rounds.tokens, self._model_rounds.seconds

    def prompt_pays(self, prompt: int, written: int) -> bool:
        """Return whether the draft model, which has not read the `prompt` tokens of a reply, will save more time than
        reading them costs, after `written` tokens of the reply."""
        left = max(self._length - written, 0.0)
        return left * (self._other_rounds.pace - self._model_rounds.pace) > prompt * self._prefill.pace

    def delays_first_token(self, prompt: int) -> bool:
        """Return whether reading the `prompt` tokens before the verifier does would delay a reply's first token by more
        than a round with the draft model takes, which is what that would save; True where it is not known."""
        return not self._model_rounds.rounds or prompt * self._prefill.pace > self._model_rounds.seconds

    def record_draft(self, seconds: float, prompt: int) -> None:
        """Record that the draft model took `seconds` for a draft, for which it first read `prompt` tokens."""
        if not prompt:
            self._drafting.add(1, seconds)
            if self._first_prompt[0]:
                (prompt, seconds), self._first_prompt = self._first_prompt, (0, 0.0)
        elif not self._drafting.rounds:
            self._first_prompt = prompt, seconds  # until it is known how much of it is the draft
            return
        if prompt:
            self._prefill.add(prompt, max(0.0, seconds - self._drafting.seconds))

    def record_model_round(self, tokens: int, seconds: float) -> None:
        """Record a round with the draft model: `tokens` in `seconds`."""
        self._rounds_since, self._try_budget = 0, 0.0
        self._model_rounds.add(tokens, seconds)

    def record_other_rounds(self, rounds: int, tokens: int, seconds: float) -> None:
        """Record so many rounds without the draft model: `tokens` in `seconds`, together."""
        self._rounds_since += rounds
        self._try_budget += EXPLORATION * seconds
        self._other_rounds.add(tokens / rounds, seconds / rounds, rounds)

    def record_length(self, drafted: int, sent: int, accepted: int) -> None:
        """Record that of `drafted` tokens of the model `sent` were verified, and `accepted` accepted. Where half of
        them are right, or so few do not pay, the next draft may be twice as long. After a draft that is all wrong it
        has one token, unless longer drafts than the first have been right."""
        if drafted >= self.longest and (not sent or 2 * accepted >= drafted):
            self.longest = 2 * drafted
        elif sent and not accepted and self.longest <= FIRST_DRAFT:
            self.longest = 1

    def record_reply(self, written: int) -> None:
        """Record the length of a complete reply."""
        self._length += _MIN_WEIGHT * (written - self._length)


_REST = 7  # rounds after which it is considered again whether a draft model that does not pay is asked
_PAUSED = "the draft model is paused: recent replies were slower with it"
_BACKS_OFF = "the draft model is paused: its last drafts did not pay and were dropped"
_RESTING = Chunk()  # of a round in which nothing is considered


class HybridDrafter(Drafter):
    """A drafter that copies if copying recently gave more tokens for its time than the draft model."""

    def __init__(
        self, retrieval: RetrievalDrafter, model: Drafter, gamma: int, rounds: DrafterSelector | None = None,
        *, linked: bool = False,
    ) -> None:  # fmt: skip
        """Let the model draft at most `gamma` tokens; retrieval may draft more. `rounds` come from earlier replies.
        `linked`: the verifier is on another device, which reads the prompt while the model does."""
        self._retrieval, self._model, self._gamma, self._linked = retrieval, model, gamma, linked
        self._rounds = rounds or DrafterSelector()
        self._number = 0  # of the round
        self._reads_prompt = self._knows_prompt = (
            False  # whether the draft model reads the prompt this time, or has read it already
        )
        self._asks_next = False  # whether the model would have drafted in the first round but for a copy
        self.asked = False
        """True if the draft model drafted in the last round, even if none of its tokens paid."""
        self._drafted = 0  # tokens that it drafted
        self._rest = 0  # rounds without a copy, in which the model is not considered
        self._plain_rounds, self._plain_tokens, self._plain_seconds = 0, 0, 0.0  # without a draft, not recorded yet
        self._both_rest = 0  # rounds to come in which neither copies nor the model are considered
        self._rested_rounds, self._rested_seconds = 0, 0.0  # that have passed, not counted yet

    @property
    def needs_verdict(self) -> bool:
        """See `Drafter.needs_verdict`."""
        return self._model.needs_verdict

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`."""
        self._number, self._reads_prompt, self._knows_prompt, self._rest = 0, False, False, 0
        self._asks_next = False
        self._both_rest, self._rested_rounds, self._rested_seconds = 0, 0, 0.0
        self._retrieval.begin(state)
        self._model.begin(state)

    def end(self) -> None:
        """See `Drafter.end`."""
        self._record_rest()
        self._record_plain()
        self._retrieval.end()
        self._model.end()

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`. While neither copies nor the model are considered, a round costs next to nothing."""
        if self._both_rest:
            self._both_rest -= 1
            return _RESTING
        self._record_rest()
        chunk = self._propose(state, gamma)
        if not (len(chunk) or self.asked or state.explain):
            copies = self._retrieval.rest
            self._both_rest = min(self._rest, copies) if self._rounds.uses_model else copies
        return chunk

    def _propose(self, state: GenerationState, gamma: int) -> Chunk:
        rounds = self._rounds
        if not self._number:
            rounds.start_episode()
        self.asked, self._drafted = False, 0
        if not rounds.uses_model:
            return _explained(self._retrieval.propose(state, gamma), _PAUSED)
        if self._rest:
            self._rest -= 1
            return self._retrieval.propose(state, gamma, alternative=rounds.model_round)
        self._record_plain()
        prompt, written = state.prompt_tokens, state.written
        due = rounds.try_due(0 if self._knows_prompt else prompt + written)
        asks = self._knows_prompt or due or rounds.prompt_pays(prompt + written, written)
        chunk = self._retrieval.propose(state, gamma, alternative=None if due else rounds.model_round)
        pays = due or self._retrieval.pays(rounds.model_round)
        now = due and self._number > 0  # the first round's time includes the verifier's prompt
        later = not (self._number or self._linked) and rounds.delays_first_token(prompt)
        self.asked = asks and not later and (now or (pays and not len(chunk)))
        if self.asked and not due and rounds.back_off.pauses:
            self.asked = False
            return _explained(chunk, _BACKS_OFF)
        if not self.asked:
            self._asks_next = asks and pays and not self._number
            self._rest = 0 if (asks and pays) or not self._number else _REST
            return chunk
        self._reads_prompt, self._knows_prompt = not self._knows_prompt, True
        began = perf_counter()
        drafted = self._model.propose(state, min(gamma, self._gamma, rounds.longest))
        took = perf_counter() - began
        self._drafted = len(drafted)
        rounds.record_draft(took, prompt if self._reads_prompt else 0)
        if not self._number:
            rounds.record_tokens(0, took)
        if len(drafted):
            drafted = self._extended(drafted, gamma)
        if not chunk.reason:
            return drafted
        behind = f", followed by {drafted.tail} copied tokens" if drafted.tail else ""
        return replace(drafted, reason=f"{chunk.reason}; the draft model drafts{behind}")

    def _extended(self, drafted: Chunk, gamma: int) -> Chunk:
        """Return the part of a draft that pays, extended by copied tokens."""
        survives = self._rounds.acceptance.survives(drafted.confidence.tolist())
        n = self._retrieval.useful_length(survives)
        return truncated(drafted, n) if n < len(drafted) else self._retrieval.extended(drafted, gamma, survives[-1])

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """See `Drafter.look_ahead`. Behind a retrieved chunk there is nothing to guess with; but behind the first one
        the draft model reads the prompt, as the verifier does, if it would have drafted otherwise."""
        if not chunk.retrieved:
            self._model.look_ahead(state, chunk, min(gamma, self._gamma), until)
        elif self._asks_next and not until():
            self._asks_next, self._knows_prompt = False, True
            began = perf_counter()
            self._model.propose(state, 1)
            self._rounds.record_draft(perf_counter() - began, state.prompt_tokens)

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """See `Drafter.unverified`: what the small model drafted, or drafts now."""
        if self.needs_verdict:
            return Chunk()
        gamma = min(gamma, self._gamma)
        copied = chunk.retrieved or not len(chunk)
        own = self._model.propose(state, gamma) if copied else truncated(chunk, len(chunk) - chunk.tail)
        return self._model.unverified(state, own, gamma)

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Drafter.observe`."""
        verdict = turn.verdict
        if turn.chunk is _RESTING and verdict is not None and len(verdict.tokens) == 1:
            self._rested_rounds += 1
            self._rested_seconds += turn.seconds
            return
        self._model.observe(state, turn)
        self._retrieval.observe(state, turn, shared=self.asked)
        if verdict is None:
            return
        tokens, seconds, rounds = verdict.accepted + len(verdict.tokens), turn.seconds, self._rounds
        first, self._number = not self._number, self._number + 1
        if not (first or self.asked):
            self._plain_rounds += 1
            self._plain_tokens += tokens
            self._plain_seconds += seconds
            if self._plain_rounds > _REST:
                self._record_plain()
            return
        self._record_plain()
        rounds.back_off.record(len(turn.chunk) > 0 if self._drafted else None)
        rounds.acceptance.observe(turn.chunk, verdict.accepted)
        if self._drafted:
            sent = len(turn.chunk) - turn.chunk.tail
            rounds.record_length(self._drafted, sent, min(sent, verdict.accepted))
        if not first:
            if not self._reads_prompt:  # else the time includes a prompt
                rounds.record_model_round(tokens, seconds)
            rounds.record_tokens(tokens, seconds)
        self._reads_prompt = False

    def _record_rest(self) -> None:
        """Record the rounds in which both rested."""
        rounds, seconds = self._rested_rounds, self._rested_seconds
        if rounds:
            self._rested_rounds, self._rested_seconds = 0, 0.0
            self._rest = max(0, self._rest - rounds)
            self._retrieval.rested(rounds, seconds)
            self._plain_rounds += rounds
            self._plain_tokens += rounds
            self._plain_seconds += seconds

    def _record_plain(self) -> None:
        """Record the rounds since the last one in which the draft model was asked."""
        if self._plain_rounds:
            self._rounds.back_off.rest(self._plain_rounds)
            self._rounds.record_other_rounds(self._plain_rounds, self._plain_tokens, self._plain_seconds)
            self._rounds.record_tokens(self._plain_tokens, self._plain_seconds)
            self._plain_rounds, self._plain_tokens, self._plain_seconds = 0, 0, 0.0

    def close(self) -> None:
        self._model.close()


def _explained(chunk: Chunk, why: str) -> Chunk:
    """Return a chunk with `why` behind its reason, if it is empty and reasons are requested."""
    return replace(chunk, reason=f"{chunk.reason}; {why}") if chunk.reason and not len(chunk) else chunk

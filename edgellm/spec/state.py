"""The state of one running reply, which the decoding loop passes to drafter, gate and verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from edgellm.engine import ShouldStop, never
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.drafting.bandit import Bandit
from edgellm.spec.ngram.sources import ContextLookup, Cursor
from edgellm.spec.types import GREEDY, NO_IDS, Channel, Expected, Ids, PromptProgress, Sampling

Filling: TypeAlias = tuple[Sequence[int], Sequence[float]]
"""The padded numbers of rows, and the costs of heads, for `Context.fill`."""
NOT_FILLED: Filling = (), ()


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """`max_tokens` of an answer; `context` positions for prompt and reply together; `gamma` drafted tokens a chunk.

    A thought before the answer has `max_thinking` tokens at most, and with the answer `max_total`; None: no limit.
    Without a draft, up to `extra` tokens beyond the next one are asked for at once, for fewer round trips on a link;
    with `GenerationState.tail` whenever that bandit chooses so.
    """

    max_tokens: int = 512
    context: int = 4096
    gamma: int = 4
    extra: int = 0
    max_thinking: int | None = None
    max_total: int | None = None


def _all_pay() -> Sequence[float]:
    return ()


@dataclass(frozen=True, slots=True)
class DraftRules:
    """The draft model's rules for a reply.

    A chunk ends after a token whose confidence is below `stop_below`. Drafts with less confidence than `lookup_below`
    are replaced by the context's token. `greedy`: the most probable tokens are drafted in sampled replies, too, for a
    verifier that draws by numbers of its own: two independent draws agree less often. `floors` returns the break-even
    chance for each place of a chunk; later places have none.
    """

    stop_below: float = 0.0
    lookup_below: float = 0.0
    greedy: bool = False
    floors: Callable[[], Sequence[float]] = _all_pay


class GenerationState:
    """A running reply: its prompt, the committed tokens, how tokens are drawn, and settings for the models.

    Only the decoding loop appends to it and enters channels; nothing else changes.
    """

    def __init__(
        self,
        prompt: Ids = NO_IDS,
        sampling: Sampling = GREEDY,
        limits: GenerationLimits | None = None,
        *,
        rules: DraftRules | None = None,
        should_stop: ShouldStop = never,
        logprobs: int | None = None,
        explain: bool = False,
        context: ContextLookup | None = None,
        expect: Callable[[Expected], None] | None = None,
        filling: Filling = NOT_FILLED,
        channel: Channel = Channel.ANSWER,
        draft_prompt: Ids | None = None,
        grammar: ReplyGrammar | None = None,
        on_progress: Callable[[PromptProgress], None] | None = None,
        tail: Bandit | None = None,
    ) -> None:
        """Begin a reply to `prompt` (n,), which continues in `channel`.

        `should_stop` is polled between tokens and during long computations. With `logprobs`, verdicts include the
        log-probabilities of their tokens and of as many other tokens. `explain`: reasons are requested.
        `context` is looked up where the draft model is not confident. `expect` is called with the verifier's
        next-token predictions at positions of the prompt, if they are wanted. Verifiers in this process pad their
        decodes as `filling` says. `draft_prompt` (m,) is the prompt for a draft model with another tokenizer, in its
        own tokens, if any. Drafts follow the `grammar`. `on_progress` is called while a model reads a long prompt.
        `tail` chooses whether `limits.extra` tokens are asked for, also behind drafts; None: not behind drafts.
        """
        self.sampling, self.limits = sampling, limits or GenerationLimits()
        self.rules = rules or DraftRules()
        self.should_stop, self.logprobs, self.explain = should_stop, logprobs, explain
        self.context, self.expect, self.filling = context, expect, filling
        self.draft_prompt, self.tail, self.grammar = draft_prompt, tail, grammar
        self._on_progress = on_progress
        self.prompt_tokens = self._length = self._committed = len(prompt)
        self._most = max(self._length, self._limited(self.limits.context, self.limits.max_total))
        self._ids = np.empty(self._most, dtype=np.int32)
        self._ids[: self._length] = prompt
        self.enter(channel)

    def prompt_progress(self, model: str) -> Callable[[int, int], None]:
        """Return a function that reports how many tokens of a long prompt `model` has read, and of how many."""

        def report(done: int, total: int) -> None:
            if self._on_progress is not None:
                self._on_progress(PromptProgress(model, done, total))

        return report

    def enter(self, channel: Channel) -> None:
        """Note that the following tokens belong to `channel`, which has its own limit."""
        self.channel, self._entered = channel, self._length
        limit = self.limits.max_thinking if channel is Channel.THINKING else self.limits.max_tokens
        self._end = self._limited(self._most, limit)

    def _limited(self, most: int, tokens: int | None) -> int:
        """Return the length after `tokens` more, at most `most`."""
        return most if tokens is None else min(most, self._length + tokens)

    @property
    def thought_is_full(self) -> bool:
        """Return whether a thought has reached its limit, and there is room for more tokens."""
        return self.channel is Channel.THINKING and self._end == self._length < self._most

    @property
    def ids(self) -> Ids:
        """Return all tokens so far, the prompt included, shape (n,). They are only appended to, so a view keeps its
        values."""
        return self._ids[: self._length]

    @property
    def committed(self) -> Ids:
        """Return the committed part of `ids`, shape (m,): without the tokens passed to `with_draft`."""
        return self._ids[: self._committed]

    @property
    def written(self) -> int:
        """Return how many tokens the reply has so far."""
        return self._length - self.prompt_tokens

    @property
    def answered(self) -> int:
        """Return how many tokens the answer has so far."""
        return self._length - self._entered if self.channel is Channel.ANSWER else 0

    @property
    def tokens_left(self) -> int:
        """Return the number of tokens that may still be written in this channel."""
        return self._end - self._length

    def append(self, token: int) -> None:
        """Commit a token."""
        self._ids[self._length] = token
        self._length = self._committed = self._length + 1

    def close_thought(self, markup: Ids) -> bool:
        """Commit the `markup` (n,) that ends a thought; the answer follows. Return False where there is no room."""
        if self._length + len(markup) >= self._most:
            return False
        for token in markup.tolist():
            self.append(token)
        self.enter(Channel.ANSWER)
        return True

    def with_draft(self, ids: Ids) -> Self:
        """Return the reply as it will be if the drafted `ids` are accepted."""
        return self._with(np.concatenate((self.ids, ids)), self._committed)

    def _with(self, ids: Ids, committed: int) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._length, other._committed = len(ids), committed
        other._end = max(self._end, len(ids))
        other._ids = np.empty(other._end, dtype=np.int32)
        other._ids[: len(ids)] = ids
        return other

    def lookup(self, prefix: Ids, committed: bool = True) -> Cursor | None:
        """Return a cursor into the context after `prefix`, if there is a context."""
        return None if self.context is None else self.context.cursor(prefix, committed)

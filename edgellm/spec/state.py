"""The state of one running reply, which the decoding loop passes to drafter, gate and verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from edgellm.engine import ShouldStop, never
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.ngram.sources import ContextLookup, Cursor
from edgellm.spec.types import GREEDY, NO_IDS, Channel, Expected, Ids, PromptProgress, Sampling


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits of a reply, in tokens; None: no limit."""

    max_tokens: int = 512  # an answer
    context: int = 4096  # positions for prompt and reply together
    gamma: int = 4  # drafted tokens a chunk
    extra: int = 0
    """Tokens beyond the next one that are asked for at once, without a draft, for fewer round trips on a link."""
    max_thinking: int | None = None  # a thought before the answer
    max_total: int | None = None  # both together


@dataclass(frozen=True, slots=True)
class DraftRules:
    """The draft model's rules for a reply."""

    stop_below: float = 0.0  # a chunk ends after a token of less confidence
    lookup_below: float = 0.0  # drafts of less confidence are replaced by the context's token
    greedy: bool = False
    """Draft the most probable tokens in sampled replies, too, for a verifier that draws by numbers of its own: two
    independent draws agree less often."""
    floors: Callable[[], Sequence[float]] = tuple  # break-even chance for each place of a chunk; later places have none
    context: ContextLookup | None = None  # looked up where the draft model is not confident
    grammar: ReplyGrammar | None = None  # drafts follow it
    prompt: Ids | None = None  # for a draft model with another tokenizer, in its own tokens, (m,)


@dataclass(frozen=True, slots=True)
class VerdictTerms:
    """The settings of a reply for its verifier."""

    logprobs: int | None = None  # verdicts have log-probabilities of their tokens, and of as many others
    expect: Callable[[Expected], None] | None = None  # called with next-token predictions at positions of the prompt
    filling: tuple[Sequence[int], Sequence[float]] = (), ()  # for `Context.fill` of a verifier in this process


class GenerationState:
    """A running reply: its prompt, the committed tokens, how tokens are drawn, and settings for the models.

    Only the decoding loop appends to it and enters channels; nothing else changes.
    """

    def __init__(
        self, prompt: Ids = NO_IDS, sampling: Sampling = GREEDY, limits: GenerationLimits = GenerationLimits(), *,
        rules: DraftRules = DraftRules(), terms: VerdictTerms = VerdictTerms(), should_stop: ShouldStop = never,
        explain: bool = False, channel: Channel = Channel.ANSWER,
        on_progress: Callable[[PromptProgress], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin a reply to `prompt` (n,), which continues in `channel`.

        `should_stop` is polled between tokens and during long computations. `explain`: reasons are requested.
        `on_progress` is called while a model reads a long prompt.
        """
        self.sampling, self.limits, self.rules, self.terms = sampling, limits, rules, terms
        self.should_stop, self.explain, self._on_progress = should_stop, explain, on_progress
        self.prompt_tokens = self._length = self._committed = len(prompt)
        self._most = max(self._length, self._limited(self.limits.context, self.limits.max_total))
        self._ids = np.empty(self._most, dtype=np.int32)
        self._ids[: self._length] = prompt
        self.enter(channel)

    def prompt_progress(self, model: str) -> Callable[[int, int], None]:
        """Return a function that reports how many tokens of a long prompt `model` has read, and of how many."""
        return lambda done, total: self._on_progress(PromptProgress(model, done, total))

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
        other, text = object.__new__(type(self)), np.concatenate((self.ids, ids))
        vars(other).update(vars(self), _length=len(text), _end=max(self._end, len(text)), _ids=text)
        return other

    def lookup(self, prefix: Ids, committed: bool = True) -> Cursor | None:
        """Return a cursor into the context after `prefix`, if there is a context."""
        return None if self.rules.context is None else self.rules.context.cursor(prefix, committed)

"""Interfaces of drafters, gates and verifiers, which compose freely; the state of a reply, and its session.

A round is *propose* (drafter), *decide* (gate), *verify* (verifier session) and *observe* (drafter and gate). Methods
that a mechanism does not need have empty defaults; `examples/` has one mechanism of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

import numpy as np

from edgellm.engine import ShouldStop, never
from edgellm.engine.hardware import N_BATCH
from edgellm.errors import Stopped, VerifierLost
from edgellm.isolation.child import POLL_SECONDS
from edgellm.spec.ngram.sources import ContextLookup, Cursor
from edgellm.spec.sampling import WHOLE_ROWS, Choice, GrammarState, ModelSampling, ReplyGrammar
from edgellm.spec.types import (
    GREEDY,
    NO_CHUNK,
    NO_IDS,
    Channel,
    Chunk,
    Decision,
    Expected,
    Ids,
    PromptProgress,
    Round,
    Sampling,
    Verdict,
)

if TYPE_CHECKING:
    from edgellm.engine.speculators.speculator import Speculator
    from edgellm.spec.drafting.cost_curve import CostCurve


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """The limits of a reply, in tokens; None: no limit."""

    max_tokens: int = 512  # an answer
    context: int = 4096  # positions for prompt and reply together
    gamma: int = 4  # drafted tokens a chunk
    extra: int = 0
    """Tokens beyond the usual one that a verdict is to have, accepted ones included, where the chunk is empty or all
    copied: the verifier writes on alone, so that a link takes fewer round trips."""
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
    widths: Sequence[int] = ()  # for `Context.fill` of a verifier in this process


class GenerationState:
    """A running reply: its prompt, the committed tokens, how tokens are drawn, and settings for the models.

    Only the decoding loop appends tokens and enters channels, and `llm.reply` closes a thought that is full. A verifier
    in this process lends its speculator.
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
        self.speculator: Speculator | None = None
        self.prompt_tokens = self._length = len(prompt)
        most = max(self._length, self._limited(self.limits.context, self.limits.max_total))
        self._ids = np.empty(most, dtype=np.int32)
        self._ids[: self._length] = prompt
        self.enter(channel)

    def prompt_progress(self, model: str) -> Callable[[int, int, int], None]:
        """Return a function that reports how many tokens of a long prompt `model` knew before, and has read by now, and
        of how many."""
        return lambda cached, done, total: self._on_progress(PromptProgress(model, cached, done, total))

    def enter(self, channel: Channel) -> None:
        """Note that the following tokens belong to `channel`, which has its own limit."""
        self.channel, self._entered = channel, self._length
        limit = self.limits.max_thinking if channel is Channel.THINKING else self.limits.max_tokens
        self._end = self._limited(len(self._ids), limit)

    def _limited(self, most: int, tokens: int | None) -> int:
        """Return the length after `tokens` more, at most `most`."""
        return most if tokens is None else min(most, self._length + tokens)

    @property
    def thought_is_full(self) -> bool:
        """Return whether a thought has reached its limit, and there is room for more tokens."""
        return self.channel is Channel.THINKING and self._end == self._length < len(self._ids)

    @property
    def ids(self) -> Ids:
        """Return all tokens so far, the prompt included, shape (n,). They are only appended to, so a view keeps its
        values."""
        return self._ids[: self._length]

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
        self._length += 1

    def close_thought(self, markup: Ids) -> bool:
        """Commit the `markup` (n,) that ends a thought; the answer follows. Return False where there is no room."""
        if self._length + len(markup) >= len(self._ids):
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

    def lend(self, speculator: Speculator | None) -> None:
        """Have the `speculator` of the reply's session at hand for a drafter."""
        self.speculator = speculator

    def lookup(self, prefix: Ids, committed: bool = True) -> Cursor | None:
        """Return a cursor into the context after `prefix`, if there is a context."""
        return None if self.rules.context is None else self.rules.context.cursor(prefix, committed)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The origin of a request. Devices (`device`) are served in turns. Cached prompts are shared only within a
    `cache_salt`: otherwise the time of a verdict would reveal one device's prompts to another."""

    device: str = ""
    cache_salt: str = ""


HERE = Tenant()
"""Requests from the verifier's own process."""


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """A request for a verdict on `draft` in `session`, its number at the verifier. `prefix` is all the text before it;
    on a link, the text behind the first `position` tokens, which the other side holds."""

    session: int
    sampling: Sampling
    position: int  # 0 except on a link
    prefix: Ids
    draft: Chunk
    extra: int = 0  # as `GenerationLimits.extra`
    logprobs: int | None = None  # the verdict has those of its tokens, and of so many others at each place
    round: int = 0  # number of the request in its session
    tenant: Tenant = HERE
    logits: bool = False  # a mesh also answers with the rows that the verdict depends on
    grammar: ReplyGrammar | None = None  # the session's, if `sampling` has a constraint
    computed: int = 0  # tokens of the text that the verifier has read so far; written by the verifier while it works
    cached: int = 0  # those that it knew before, likewise; until then a guess, the tokens of the last request


Send: TypeAlias = Callable[[VerifyRequest], Future[Verdict]]
Ahead: TypeAlias = Callable[..., None]
"""A function that drafts behind a chunk, until the function `until` returns True."""


def begun() -> Future[Verdict]:
    """Return the future of a verdict that nobody may cancel."""
    future: Future[Verdict] = Future()
    future.set_running_or_notify_cancel()
    return future


def settled(verdict: Verdict) -> Future[Verdict]:
    """Return the future of a verdict that is there already."""
    future: Future[Verdict] = Future()
    future.set_result(verdict)
    return future


class Session:
    """One reply at a verifier that takes requests by a function: a request goes out, and its verdict comes."""

    def __init__(
        self, state: GenerationState, send: Send, *, number: int = 0,
        grammar: Callable[[str], GrammarState] | None = None,
        ready: Callable[[], bool] = lambda: True, close: Callable[[], None] = lambda: None, reads: str = "",
    ) -> None:  # fmt: skip
        """Send requests with the whole text by `send`. `ready` returns at no cost whether a request would be worked on
        now; `close` ends the reply at the other side. `grammar` compiles a JSON schema, if the reply's is applied
        here. `reads` is the name under which the reading of a long prompt is reported."""
        self.state, self._send, self._number = state, send, number
        constraint = state.sampling.constraint
        self._grammar = None if constraint is None else ReplyGrammar.of(constraint, grammar)
        self.ready, self._close = ready, close
        self._report = state.prompt_progress(reads) if reads else None
        self._round = 0
        self._told = -1  # tokens whose reading was reported last
        self._asked: VerifyRequest | None = None
        self._pending: Future[Verdict] | None = None

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Future[Verdict]:
        """Ask for a verdict on `chunk` after `prefix` (all tokens so far, prompt included, shape (n,)).

        An empty chunk asks for the verifier's own next token; `extra` as `GenerationLimits.extra`. An earlier verdict
        that is not there yet is given up. The future fails with VerifierLost if the verifier is gone or makes no
        progress; the session stays usable, and `ready` says when to ask again.
        """
        if self._pending is not None:
            self._pending.cancel()
        state, self._round = self.state, self._round + 1
        self._asked = VerifyRequest(
            self._number, state.sampling, 0, prefix, chunk, extra, state.terms.logprobs, self._round,
            grammar=self._grammar, cached=0 if self._asked is None else len(self._asked.prefix),
        )  # fmt: skip
        self._pending = self._send(self._asked)
        return self._pending

    def wait(self, pending: Future[Verdict]) -> Verdict:
        """Wait for a verdict, and report meanwhile how much of a long prefix has been read. Raise what the verifier
        failed with, or Stopped."""

        def stopped() -> bool:
            asked = self._asked
            if self._report is not None and asked is not None and len(asked.prefix) - asked.cached > N_BATCH:
                told, self._told = self._told, max(asked.computed, asked.cached)
                if told != self._told:
                    self._report(asked.cached, self._told, len(asked.prefix))
            return self.state.should_stop()

        try:
            return wait_for_result(pending, stopped)
        except CancelledError:
            raise VerifierLost("The connection to the verifier is closed.", "Ask again.") from None

    def close(self) -> None:
        """End the reply, and give up pending requests."""
        if self._pending is not None:
            self._pending.cancel()
        self._close()


def wait_for_result(future: Future[T], should_stop: Callable[[], bool]) -> T:
    """Return the result of `future`, or raise its exception. Raise Stopped as soon as `should_stop` returns True."""
    while not future.done():
        with suppress(TimeoutError, CancelledError):  # `wait` of several futures would take four times as long
            future.exception(POLL_SECONDS)
            break
        if should_stop():
            raise Stopped
    return future.result()


class Drafter(ABC):
    """A proposer of next tokens: a small model, retrieval, or both. It serves one reply at a time."""

    needs_verdict: bool = False
    """Drafts must be verified, so that nothing is written without a verifier."""

    def begin(self, state: GenerationState) -> None:
        """Prepare for a reply that begins."""
        return

    @abstractmethod
    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Return up to `gamma` tokens to follow `state.ids`; an empty chunk if there are none.

        The drafter syncs its own cache with the text: it rolls back rejected drafts and takes over corrections. A chunk
        ends at an end-of-generation token. Raise Stopped where `state.should_stop` returned True meanwhile.
        """

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft up to `gamma` tokens after each predicted verdict on `chunk`, until `until` returns True. `chunk` is
        being verified, or will be once the verifier has read the prompt."""
        return

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """Return the part of `chunk` that may stand without a verdict: nothing if `needs_verdict`."""
        return NO_CHUNK if self.needs_verdict else chunk

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Observe a finished round, whose tokens are about to be committed."""
        return

    def end(self) -> None:
        """Clean up after a reply that is over."""
        return

    def close(self) -> None:
        """Free memory. The drafter is not used again."""
        return


class Gate(ABC):
    """A judge of whether a chunk is worth the verifier's time, for one reply."""

    layers: tuple[int, ...] = ()
    """Layers of the draft model whose attention the gate needs as the importance of drafted tokens."""

    @abstractmethod
    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """Return whether `chunk`, which is not empty and follows `state.ids`, goes to the verifier, and why."""

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Observe a finished round, whose tokens are about to be committed."""
        return


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a verifier."""

    name: str
    context_length: int  # positions of a session
    logprobs: bool = False  # verdicts can have them
    penalties: bool = False  # it follows sampling rules with penalties
    grammars: bool = False  # it follows sampling rules with a constraint
    choice: Choice = WHOLE_ROWS  # the set that tokens are chosen from
    speculator: str = ""  # name of the speculator on the states of sessions in this process

    def refusal(self, sampling: Sampling) -> str:
        """Return why tokens cannot be chosen by `sampling`, as a clause; "" if they can."""
        if sampling.penalties is not None and not self.penalties:
            return "it applies no penalties"
        if sampling.constraint is not None and not self.grammars:
            return "it follows no JSON schemas"
        return self.choice.refusal(sampling)


class BlockingSession(Session, ABC):
    """The session of a verifier of your own, which computes a verdict in the thread that asks for it."""

    @abstractmethod
    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return the verdict that `Session.submit` asks for."""

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Future[Verdict]:
        return settled(self.verify(prefix, chunk, extra))

    def wait(self, pending: Future[Verdict]) -> Verdict:
        return pending.result()

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The facts about a verifier in other processes: a function that returns its model's hash; across a link also its
    `address`, a function that returns whether it is `up`, and the `sampling` of its model. Stock servers and gateways
    have a `finding`, how they verify, and `notices` for the user; `reason` is why "auto" chose it."""

    model_hash: Callable[[], str]
    address: str = ""
    up: Callable[[], bool] | None = None
    sampling: ModelSampling | None = None
    finding: str = ""
    notices: tuple[str, ...] = ()
    reason: str = ""


class Verifier(ABC):
    """A judge of chunks: in this process, over a link, or a mesh of layer workers. By default, a verifier has only a
    `name` and a `context_length`, and is never away."""

    name: str
    context_length: int
    extra: int = 0
    """`GenerationLimits.extra` of replies that may copy, or have no drafter."""
    elsewhere: Elsewhere | None = None
    """None of a verifier in this process."""
    _capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Return the abilities, which may change when a verifier is replaced."""
        return self._capabilities or Capabilities(self.name, self.context_length)

    @property
    def shared(self) -> int:
        """Return the number of decodes in this process that shared the cores, and have unrepresentative times."""
        return 0

    @property
    def crowded(self) -> bool:
        """Return whether several replies share batches, which drafts would make longer."""
        return False

    def use_curve(self, curve: CostCurve) -> None:
        """Choose the pieces in which prompts are read by a measured cost curve."""
        return

    def locate(self, elsewhere: Elsewhere) -> None:
        """Note that the verifier is in other processes."""
        self.elsewhere = elsewhere

    @abstractmethod
    def open(self, state: GenerationState) -> Session:
        """Return a session for the reply. Raise VerifierUnreachable without an answer, and VocabularyMismatch."""

    def close(self) -> None:
        """Free memory."""
        return

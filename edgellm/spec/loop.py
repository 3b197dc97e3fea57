"""The decoding loop: draft, gate, verify, merge (Synera, sections 3.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import count, islice
from time import perf_counter
from typing import Protocol, TypeAlias

from edgellm.errors import EdgeError, Stopped
from edgellm.spec.channels import ChannelSplitter
from edgellm.spec.protocols import Drafter, Gate, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel, Chunk, Decision, Explanation, Notice, Round, Source, Token, Verdict
from edgellm.spec.verifier import Verification

Event: TypeAlias = Token | Notice | Explanation
Piece: TypeAlias = Callable[[int], bytes]
_NOTHING = Chunk()
_UNDRAFTED = Decision(True, "nothing was drafted")
_COPIED = Decision(True, "copied tokens are always verified")


class Detokenizer(Protocol):
    """The loop's view of tokens, which a model provides."""

    def piece(self, token: int) -> bytes: ...

    def is_eog(self, token: int) -> bool: ...


class NoDrafter(Drafter):
    """A drafter that drafts nothing: the verifier writes alone."""

    needs_verdict = True

    def propose(self, state: GenerationState, gamma: int) -> Chunk:  # noqa: ARG002
        """Return an empty chunk."""
        return _NOTHING


def generate(
    state: GenerationState, *, vocabulary: Detokenizer, drafter: Drafter | None, gate: Gate, verifier: Verifier | None,
    stats: Summary, announce: bool = False, channels: ChannelSplitter | None = None,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply to the prompt of `state`, token by token, without the token that ends the turn.

    Without a drafter the verifier writes alone, without a verifier the draft model. `announce`: the verifier starts to
    read the prompt at once, not with the first verdict. `stats` is updated on the way. `channels` tells thoughts from
    the answer, and removes the markup. The iterator may be closed at any point; `state.should_stop` is polled between
    tokens and during long computations. Without a draft model, a busy verifier is waited for.

    Raises VerifierUnreachable, VocabularyMismatch: from opening the session, before the first token; VerifierLost: the
    verifier is gone, and there is no draft model to continue with; Stopped: `state.should_stop` returned True.
    """
    channels = channels or ChannelSplitter()
    events = _rounds(state, vocabulary, drafter or NoDrafter(), gate, verifier, stats, announce=announce)
    try:
        for event in events:
            if not isinstance(event, Token):
                yield event
                continue
            yield from _shown(channels.feed(event), stats)
            if channels.channel is not state.channel:
                state.enter(channels.channel)
            if state.should_stop():
                return
    except Stopped:
        raise
    except EdgeError:  # A lost verifier must not lose tokens.
        yield from _shown(channels.end(), stats)
        raise
    finally:
        events.close()
    yield from _shown(channels.end(), stats)


def _shown(tokens: Iterator[Token], stats: Summary) -> Iterator[Token]:
    for token in tokens:
        stats.show(token)
        yield token


def _rounds(
    state: GenerationState, vocabulary: Detokenizer, drafter: Drafter, gate: Gate, verifier: Verifier | None,
    stats: Summary, *, announce: bool,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply as `generate` does, in one channel."""
    session = None if verifier is None else verifier.open(state)
    verification = Verification(state, session, alone=drafter.needs_verdict, announce=announce)
    ahead = partial(drafter.look_ahead, state, gamma=state.limits.gamma)
    try:
        drafter.begin(state)
        for number in count(stats.rounds):
            if state.should_stop():
                return
            if not state.tokens_left:
                yield from _finish_full(state, stats)
                return
            gamma, began = min(state.limits.gamma, state.tokens_left), perf_counter()
            chunk = _drafted(state, drafter, gamma)
            decision = verification.unavailable() or _decide(state, chunk, drafter, gate)
            asked = perf_counter()
            verdict = verification.verify(chunk, ahead) if decision.offload else None
            if verdict is None:
                chunk = drafter.unverified(state, chunk, gamma)
            new_tokens = merge(chunk, verdict, number, vocabulary.piece)
            turn = Round(number, chunk, decision, verdict, began, asked, perf_counter())
            stats.observe(turn, state.channel)
            drafter.observe(state, turn)
            gate.observe(state, turn)
            if not new_tokens:
                if (yield from verification.wait_until_ready(verdict)):
                    continue
                stats.finish("stop")
                return
            yield from verification.notices()
            if state.explain:
                yield Explanation(number, _explanation(turn))
            for new in new_tokens:
                if not state.tokens_left:
                    break
                if vocabulary.is_eog(new.id):
                    stats.stop(new.id, new.source)
                    return
                state.append(new.id)
                stats.token(new)
                yield new
    finally:
        drafter.end()
        verification.close()


def _drafted(state: GenerationState, drafter: Drafter, gamma: int) -> Chunk:
    """Return a draft, as far as it follows the grammar: copies and translated drafts may not."""
    chunk = drafter.propose(state, gamma)
    if state.rules.grammar is None:
        return chunk
    n = state.rules.grammar.follows(state.ids, chunk.ids)
    return chunk.part(0, n) if n else _NOTHING


def _decide(state: GenerationState, chunk: Chunk, drafter: Drafter, gate: Gate) -> Decision:
    if not len(chunk):
        return _UNDRAFTED
    return _COPIED if drafter.needs_verdict else gate.decide(state, chunk)


def merge(chunk: Chunk, verdict: Verdict | None, number: int = 0, piece: Piece = lambda _: b"") -> list[Token]:
    """Return the new tokens of a round. Without a verdict the drafts stay."""
    n, nothing = len(chunk), [None] * len(chunk)
    kept = n if verdict is None else verdict.accepted
    facts = zip(
        chunk.ids.tolist(), chunk.confidence.tolist() or nothing, chunk.importance.tolist() or nothing,
        chunk.exit_layers or nothing, strict=True,
    )  # fmt: skip
    logprobs = iter(() if verdict is None else verdict.logprobs)
    found = []
    for at, (token, confidence, importance, layer) in enumerate(islice(facts, kept)):
        if verdict is None:
            source = Source.PARALLEL if at < chunk.ahead else Source.DRAFT
        else:
            source = Source.RETRIEVED if chunk.retrieved or at >= n - chunk.tail else Source.ACCEPTED
        probs = next(logprobs, None)
        found.append(Token(token, piece(token), source, confidence, importance, layer, number, probs))
    own = Source.VERIFIER if not n else Source.CORRECTED if kept < n else Source.BONUS
    for token in () if verdict is None else verdict.tokens.tolist():
        found.append(Token(token, piece(token), own, round=number, logprobs=next(logprobs, None)))
        own = Source.VERIFIER
    return found


def _finish_full(state: GenerationState, stats: Summary) -> Iterator[Notice]:
    """Finish the reply because no room is left."""
    stats.finish("length")
    thinking = state.channel is Channel.THINKING
    if len(state.ids) >= state.limits.context and (thinking or state.answered < state.limits.max_tokens):
        yield Notice(f"The context of {state.limits.context} tokens is full: the reply ends here.")


def _explanation(turn: Round) -> str:
    chunk, decision, verdict = turn.chunk, turn.decision, turn.verdict
    drafted = f"{'retrieved' if chunk.retrieved else 'drafted'} {len(chunk)}"
    if chunk.reason:
        drafted += f" ({chunk.reason})"
    elif len(chunk.confidence):
        drafted += f" (mean confidence {float(chunk.confidence.mean()):.2f})"
    if chunk.from_context:
        drafted += f", {chunk.from_context} of them taken from the context"
    if not decision.offload:
        return f"{drafted}, kept unverified: {decision.reason}"
    if verdict is None:
        return f"{drafted}, sent to the verifier ({decision.reason}), and no verdict came: kept unverified"
    return (
        f"{drafted}, sent to the verifier ({decision.reason}): it accepted {verdict.accepted}, wrote"
        f" {len(verdict.tokens)}, and took {verdict.seconds * 1e3:.1f} ms"
    )

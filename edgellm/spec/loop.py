"""The decoding loop: draft, gate, verify, merge (Synera, sections 3.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from edgellm.spec.guarded_session import GuardedSession
from edgellm.spec.protocols import Copies, Drafter, Gate, Learns, LooksAhead, Verifier
from edgellm.spec.stats import Stats
from edgellm.spec.types import (
    Chunk,
    Decision,
    Explanation,
    Ids,
    Logprobs,
    Notice,
    Sampling,
    Source,
    Token,
    Verdict,
)

Event: TypeAlias = Token | Notice | Explanation


class Alphabet(Protocol):
    """What the loop must know of tokens. A model knows it."""

    def piece(self, token: int) -> bytes: ...

    def is_eog(self, token: int) -> bool: ...


# Told of a round: the chunk, tokens before it, the verdict if there is one, seconds of drafting, and of waiting for it.
Watch: TypeAlias = Callable[[Chunk, int, Verdict | None, float, float], None]


def _nobody(*_: object) -> None:
    """Watches nothing."""


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """`max_tokens` of a reply; `context` positions for prompt and reply together; `gamma` drafted tokens a chunk.

    Where nothing is drafted, up to `extra` tokens beyond the next one are asked for at once: fewer round trips on a
    link.
    """

    max_tokens: int
    context: int
    gamma: int = 4
    extra: int = 0


def generate(
    prompt: Ids,
    *,
    alphabet: Alphabet,
    drafter: Drafter | None,
    gate: Gate,
    verifier: Verifier | None,
    sampling: Sampling,
    limits: GenerationLimits,
    stats: Stats,
    explain: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    watch: Watch = _nobody,
    announce: bool = False,
) -> Iterator[Event]:
    """Writes the reply to `prompt` (n,), token by token; the token that ends the turn is not among them.

    Without a drafter the verifier writes alone, without a verifier the draft model. A drafter that looks ahead does so
    while a verdict is on its way. `announce`: the verifier reads the prompt at once, and not when it is asked first.
    `stats` is filled on the way, and `watch` is told of every round. The iterator may be closed at any point; `stopped`
    is asked between tokens, and by what can heed it also meanwhile. A busy verifier is waited for where nobody drafts.

    Raises:
        VerifierUnreachable, VocabularyMismatch: from opening the session, before the first token.
        VerifierLost: the verifier is gone, and no draft model is there to go on.
        Stopped: `stopped` said so in the middle of a computation.
    """
    text = _Text(prompt, limits)
    copies = drafter if isinstance(drafter, Copies) else None
    alone = drafter is None or (copies is not None and copies.only)
    session = verifier.open(sampling) if verifier is not None else None
    line = GuardedSession(session, alone, stopped, prompt if announce else None)
    ahead = (
        partial(drafter.look_ahead, gamma=limits.gamma, sampling=sampling) if isinstance(drafter, LooksAhead) else None
    )
    learns = drafter if isinstance(drafter, Learns) else None
    try:
        for number in count():
            if stopped():
                return
            if not (room := text.room()):
                yield from _full(stats, limits)
                return
            began = perf_counter()
            chunk = drafter.draft(text.ids(), min(limits.gamma, room), sampling) if drafter is not None else _NOTHING
            decision = line.shut() or (gate.decide(chunk, stats.tokens, limits.max_tokens) if len(chunk) else _ALONE)
            extra = 0 if len(chunk) else min(limits.extra, room - 1)
            asked = perf_counter()
            verdict = line.ask(text.ids(), chunk, extra, ahead) if decision.offload else None
            if verdict is None and copies is not None:
                chunk = copies.unchecked(chunk, text.ids(), min(limits.gamma, room), sampling)
            words = merge(chunk, verdict)
            now = perf_counter()
            stats.round(chunk, verdict, began, asked, now)
            watch(chunk, stats.tokens, verdict, asked - began, now - asked)
            if learns is not None and verdict is not None:
                learns.told(chunk, verdict, now - began)
            if not words:
                if (yield from line.wait(verdict)):
                    continue
                stats.finish_reason = "stop"
                return
            yield from line.tell()
            if explain:
                yield Explanation(number, _explanation(chunk, decision, verdict))
            for word in words[:room]:
                if alphabet.is_eog(word.id):
                    stats.stop(word.id, word.source)
                    return
                text.append(word.id)
                token, source, confidence, importance, exit_layer, said = word
                piece = alphabet.piece(token)
                written = Token(token, piece, source, confidence, importance, exit_layer, number, said)
                stats.token(written)
                yield written
                if stopped():
                    return
    finally:
        line.close()


class Word(NamedTuple):
    """What a round adds to the reply: the fields of a `Token` that are known before it is written."""

    id: int
    source: Source
    confidence: float | None = None
    importance: float | None = None
    exit_layer: int | None = None
    logprobs: Logprobs | None = None


def merge(chunk: Chunk, verdict: Verdict | None) -> list[Word]:
    """What a round adds to the reply. Without a verdict the drafts stay."""
    n, nothing = len(chunk), [None] * len(chunk)
    kept = n if verdict is None else verdict.accepted
    stands = Source.DRAFT if verdict is None else Source.RETRIEVED if chunk.retrieved else Source.ACCEPTED
    confidence, importance = chunk.confidence.tolist() or nothing, chunk.importance.tolist() or nothing
    known = zip(chunk.ids.tolist(), confidence, importance, chunk.exit_layers or nothing, strict=True)
    words = [Word(token, stands, c, i, layer) for token, c, i, layer in known][:kept]
    for at in range(n - chunk.tail, kept):
        words[at] = words[at]._replace(source=Source.RETRIEVED)
    if verdict is None and chunk.ahead:
        words[: chunk.ahead] = [word._replace(source=Source.PARALLEL) for word in words[: chunk.ahead]]
    if verdict is not None:
        own = Source.VERIFIER if not n else Source.CORRECTED if kept < n else Source.BONUS
        for token in verdict.tokens.tolist():
            words.append(Word(token, own))
            own = Source.VERIFIER
        for at, logprobs in enumerate(verdict.logprobs):
            words[at] = words[at]._replace(logprobs=logprobs)
    return words


class _Text:
    """Prompt and reply so far. Only ever appended to, so the views it has given out keep their values."""

    def __init__(self, prompt: Ids, limits: GenerationLimits) -> None:
        self._length = len(prompt)
        self._end = max(self._length, min(limits.context, self._length + limits.max_tokens))
        self._ids = np.empty(self._end, dtype=np.int32)
        self._ids[: self._length] = prompt

    def ids(self) -> Ids:
        return self._ids[: self._length]

    def room(self) -> int:
        """Tokens that may still be written."""
        return self._end - self._length

    def append(self, token: int) -> None:
        self._ids[self._length] = token
        self._length += 1


def _full(stats: Stats, limits: GenerationLimits) -> Iterator[Notice]:
    """No room is left."""
    stats.finish_reason = "length"
    if stats.tokens < limits.max_tokens:
        yield Notice(f"The context of {limits.context} tokens is full, and the reply ends here.")


def _explanation(chunk: Chunk, decision: Decision, verdict: Verdict | None) -> str:
    drafted = f"{'retrieved' if chunk.retrieved else 'drafted'} {len(chunk)}"
    if chunk.reason:
        drafted += f" ({chunk.reason})"
    elif len(chunk.confidence):
        drafted += f" (mean confidence {float(chunk.confidence.mean()):.2f})"
    if chunk.heeded:
        drafted += f", {chunk.heeded} of them as the context has it"
    if not decision.offload:
        return f"{drafted}, kept unchecked: {decision.reason}"
    if verdict is None:
        return f"{drafted}, sent to the verifier ({decision.reason}), and no verdict came: kept unchecked"
    return (
        f"{drafted}, sent to the verifier ({decision.reason}): it accepted {verdict.accepted}, wrote"
        f" {len(verdict.tokens)}, and took {verdict.seconds * 1e3:.1f} ms"
    )


_NOTHING = Chunk()
_ALONE = Decision(True, "nothing was drafted")

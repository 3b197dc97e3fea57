"""The decoding loop: draft, gate, verify, merge (Synera, sections 3.1 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from edgellm.errors import ProtocolError, VerifierLost
from edgellm.spec.economy import Economy
from edgellm.spec.protocols import Drafter, Gate, LooksAhead, Verifier, VerifierSession
from edgellm.spec.records import Chunk, Decision, Explanation, Ids, Notice, Sampling, Source, Token, Verdict
from edgellm.spec.stats import Stats

Event: TypeAlias = Token | Notice | Explanation


class Alphabet(Protocol):
    """What the loop must know of tokens. A model knows it."""

    def piece(self, token: int) -> bytes: ...

    def is_eog(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` of a reply; `context` positions for prompt and reply together; `gamma` drafted tokens a chunk.

    Where nobody drafts, up to `extra` tokens beyond the next one are asked for at once: fewer round trips on a link.
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
    limits: Limits,
    stats: Stats,
    explain: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    economy: Economy | None = None,
) -> Iterator[Event]:
    """Writes the reply to `prompt` (n,), token by token; the token that ends the turn is not among them.

    Without a drafter the verifier writes alone, without a verifier the draft model. A drafter that looks ahead does so
    while a verdict is on its way. `stats` is filled on the way, and `economy` with times and verdicts. The iterator may
    be closed at any point; `stopped` is asked between tokens.

    Raises:
        VerifierUnreachable, VocabularyMismatch: from opening the session, before the first token.
        VerifierLost: the verifier is gone, and no draft model is there to go on.
    """
    text = _Text(prompt, limits)
    line = _Line(verifier.open(sampling) if verifier is not None else None)
    ahead = (
        partial(drafter.look_ahead, gamma=limits.gamma, sampling=sampling) if isinstance(drafter, LooksAhead) else None
    )
    try:
        for number in count():
            if stopped():
                return
            if not (room := text.room()):
                stats.finish_reason = "length"
                if stats.tokens < limits.max_tokens:
                    yield Notice(f"The context of {limits.context} tokens is full, and the reply ends here.")
                return
            began = perf_counter()
            chunk = drafter.draft(text.ids(), min(limits.gamma, room), sampling) if drafter is not None else _NOTHING
            decision = line.shut() or (gate.decide(chunk, stats.tokens, limits.max_tokens) if len(chunk) else _ALONE)
            extra = min(limits.extra, room - 1) if drafter is None else 0
            asked = perf_counter()
            verdict = line.ask(text.ids(), chunk, extra, ahead) if decision.offload else None
            words = merge(chunk, verdict)
            now = perf_counter()
            stats.round(chunk, verdict, began, now)
            if economy is not None:
                economy.round(chunk, verdict, asked - began, now - asked)
            if not words:
                line.nobody_wrote(verdict)
                stats.finish_reason = "stop"
                return
            while line.news:
                yield line.news.pop(0)
            if explain:
                yield Explanation(number, _explanation(chunk, decision, verdict))
            for word in words[:room]:
                if alphabet.is_eog(word.id):
                    stats.stop(word.source)
                    return
                text.append(word.id)
                token, source, confidence, importance, exit_layer = word
                written = Token(token, alphabet.piece(token), source, confidence, importance, exit_layer, number)
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


def merge(chunk: Chunk, verdict: Verdict | None) -> list[Word]:
    """What a round adds to the reply. Without a verdict the drafts stay."""
    n, nothing = len(chunk), [None] * len(chunk)
    kept = n if verdict is None else verdict.accepted
    stands = Source.DRAFT if verdict is None else Source.RETRIEVED if chunk.retrieved else Source.ACCEPTED
    confidence, importance = chunk.confidence.tolist() or nothing, chunk.importance.tolist() or nothing
    known = zip(chunk.ids.tolist(), confidence, importance, chunk.exit_layers or nothing, strict=True)
    words = [Word(token, stands, c, i, layer) for token, c, i, layer in known][:kept]
    if verdict is None and chunk.ahead:
        words[: chunk.ahead] = [word._replace(source=Source.PARALLEL) for word in words[: chunk.ahead]]
    if verdict is not None:
        own = Source.VERIFIER if not n else Source.CORRECTED if kept < n else Source.BONUS
        for token in verdict.tokens.tolist():
            words.append(Word(token, own))
            own = Source.VERIFIER
    return words


class _Line:
    """The way to the verifier: asks, notices when it is cut and when it is whole again."""

    def __init__(self, session: VerifierSession | None) -> None:
        self._session = session
        self._lost = False
        self.news: list[Notice] = []

    def shut(self) -> Decision | None:
        """Why nothing can be asked now, or None where something can."""
        if self._session is None:
            return _NO_VERIFIER
        ready = self._session.ready()
        if ready == self._lost:
            self._lost = not ready
            self.news.append(BACK if ready else LOST)
        return None if ready else _AWAY

    def ask(self, prefix: Ids, chunk: Chunk, extra: int, ahead: Callable[..., None] | None) -> Verdict | None:
        """The verdict on `chunk`, or None where the verifier is lost over it. The device drafts `ahead` meanwhile."""
        if self._session is None:
            return None
        try:
            pending = self._session.submit(prefix, chunk, extra)
            if ahead is not None and len(chunk):
                ahead(prefix, chunk, until=pending.done)
            return pending.result()
        except VerifierLost:
            self._lost = True
            self.news.append(LOST)
            return None

    def nobody_wrote(self, verdict: Verdict | None) -> None:
        """A round brought no token. That is an end only where there was nobody to ask."""
        if verdict is not None:
            raise ProtocolError(
                "The verifier answered without a token.", "Run the same version of edgellm on both sides."
            )
        if self._lost:
            raise VerifierLost(
                "The verifier is gone, and no draft model is there to go on.",
                "Start it again, or draft with a small model.",
            )

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class _Text:
    """Prompt and reply so far. Only ever appended to, so the views it has given out keep their values."""

    def __init__(self, prompt: Ids, limits: Limits) -> None:
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


def _explanation(chunk: Chunk, decision: Decision, verdict: Verdict | None) -> str:
    drafted = f"drafted {len(chunk)}"
    if len(chunk.confidence):
        drafted += f" (mean confidence {float(chunk.confidence.mean()):.2f})"
    if not decision.offload:
        return f"{drafted}, kept unchecked: {decision.reason}"
    if verdict is None:
        return f"{drafted}, sent to the verifier ({decision.reason}), and no verdict came: kept unchecked"
    return (
        f"{drafted}, sent to the verifier ({decision.reason}): it accepted {verdict.accepted}, wrote"
        f" {len(verdict.tokens)}, and took {verdict.seconds * 1e3:.1f} ms"
    )


LOST = Notice("The verifier is gone: the reply goes on from the draft model alone, and what it writes is not checked.")
BACK = Notice("The verifier is back: drafts are checked again.")

_NOTHING = Chunk()
_ALONE = Decision(True, "nothing was drafted")
_AWAY = Decision(False, "the verifier is away")
_NO_VERIFIER = Decision(False, "there is no verifier")

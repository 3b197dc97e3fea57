"""Mixed drafting: retrieval first, and the small model where retrieval has nothing better to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm.spec.ahead import first
from edgellm.spec.protocols import Drafter, LooksAhead
from edgellm.spec.records import Chunk, Ids, Sampling, Verdict
from edgellm.spec.retrieval.drafter import RetrievalDrafter

_MEMORY = 0.9  # what a round with the small model counts for the next one
TRIED = 4
"""Rounds with the small model that its worth is judged by, at least."""


class MixedDrafter:
    """Copies where that brings more tokens for its time than asking the small model, by what both brought of late."""

    def __init__(self, retrieval: RetrievalDrafter, model: Drafter, gamma: int) -> None:
        """`gamma`: tokens that the model drafts, at most; retrieval may draft more."""
        self._retrieval, self._model, self._gamma = retrieval, model, gamma
        self._tokens = self._seconds = 0.0  # what rounds with the small model brought and took
        self._rounds = 0

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """See `Drafter.draft`."""
        usual = (self._tokens, self._seconds) if self._rounds >= TRIED else None
        chunk = self._retrieval.draft(prefix, gamma, sampling, instead=usual)
        if len(chunk):
            return chunk
        drafted = self._model.draft(prefix, min(gamma, self._gamma), sampling)
        if len(drafted) and drafted.distributions is None:
            drafted = self._retrieval.behind(drafted, gamma)
        if not chunk.reason:
            return drafted
        behind = f", and {drafted.tail} tokens are copied behind it" if drafted.tail else ""
        return replace(drafted, reason=f"{chunk.reason}; the small model drafts{behind}")

    @property
    def only(self) -> bool:
        """See `Copies.only`."""
        return False

    def unchecked(self, chunk: Chunk, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """See `Copies.unchecked`: what the small model drafted, or drafts now."""
        if chunk.retrieved:
            return self._model.draft(prefix, min(gamma, self._gamma), sampling)
        return first(chunk, len(chunk) - chunk.tail)

    def told(self, chunk: Chunk, verdict: Verdict, seconds: float) -> None:
        """See `Learns.told`."""
        self._retrieval.told(chunk, verdict, seconds)
        if len(chunk) and not chunk.retrieved and not chunk.tail:
            keep = min(_MEMORY, self._rounds / (self._rounds + 1.0))
            self._rounds += 1
            self._tokens += (1.0 - keep) * (verdict.accepted + len(verdict.tokens) - self._tokens)
            self._seconds += (1.0 - keep) * (seconds - self._seconds)

    def close(self) -> None:
        self._model.close()


class MixedAheadDrafter(MixedDrafter):
    """One whose small model drafts on while a verdict on a draft of its own is on its way."""

    def __init__(self, retrieval: RetrievalDrafter, model: Drafter, ahead: LooksAhead, gamma: int) -> None:
        super().__init__(retrieval, model, gamma)
        self._ahead = ahead

    def look_ahead(
        self, prefix: Ids, chunk: Chunk, *, gamma: int, sampling: Sampling, until: Callable[[], bool]
    ) -> None:
        """See `LooksAhead.look_ahead`. Behind a retrieved chunk there is nothing to guess with."""
        if not chunk.retrieved:
            self._ahead.look_ahead(prefix, chunk, gamma=min(gamma, self._gamma), sampling=sampling, until=until)

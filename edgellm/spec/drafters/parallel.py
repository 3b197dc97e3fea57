"""Stall-free parallel inference (Synera, 4.4): drafting on behind a guess at the verdict while it is on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

import numpy as np

from edgellm.spec.drafters.acceptance import Acceptance, Probabilities
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.verdict_prediction import PredictedVerdict, PredictionStats, guesses
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, ContextMatch, Floats, Ids, Round

T = TypeVar("T")
ALTERNATIVES = 15
"""Candidates for the verifier's token at each place; the paper has three, and follows one."""
FAR = 8
"""Tokens that are drafted ahead at most, if the verdict leaves time: more than a chunk, for the next ones too."""


class ParallelDrafter(Drafter):
    """A drafter that drafts on while a verdict is on its way. It keeps what it has drafted if the guess was right."""

    def __init__(
        self,
        drafter: ModelDrafter,
        *,
        is_eog: Callable[[int], bool],
        rejection: Callable[[Sequence[float]], Probabilities],
        branches: int | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        """Follow `branches` guesses at once, by default as many as `drafter` has room for; `rejection` predicts from
        the confidence of a chunk's tokens where it will be rejected, as `verdict_prediction.rejection` does.
        `acceptance` learns from the verdicts."""
        room = drafter.room
        self._drafter, self._rejection, self._is_eog = drafter, rejection, is_eog
        self._branches = room if branches is None else min(branches, room)
        self._ahead: list[tuple[Ids, Chunk]] = []
        self._left: tuple[Ids, Chunk] | None = None  # the rest of what was taken over, beyond the chunk
        self._seconds = 0.0
        self._acceptance = acceptance
        self.guessed = PredictionStats()

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`."""
        self._drafter.begin(state)

    def end(self) -> None:
        """See `Drafter.end`."""
        self._drafter.end()

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Drafter.observe`."""
        self._drafter.observe(state, turn)
        if self._acceptance is not None and turn.verdict is not None:
            self._acceptance.told(turn.chunk, turn.verdict.accepted)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`. Tokens that were drafted ahead behind exactly this text are taken over."""
        prefix = state.ids
        ready = next((chunk for known, chunk in self._ahead if len(chunk) and np.array_equal(known, prefix)), None)
        if self._ahead:
            self.guessed.tried(ready is not None, self._seconds)
        elif self._left is not None and np.array_equal(self._left[0], prefix):
            ready = self._left[1]
        self._ahead, self._left = [], None
        if ready is None:
            return self._drafter.propose(state, gamma)
        doubtful = np.flatnonzero(ready.confidence[:gamma] < state.rules.stop_below)
        n = int(doubtful[0]) + 1 if len(doubtful) else gamma
        if len(ready) > n:
            self._left = np.concatenate((prefix, ready.ids[:n])), part(ready, n, len(ready))
            ready = part(ready, 0, n)
        if len(ready) == n or self._is_eog(int(ready.ids[-1])):
            return replace(ready, ahead=len(ready))
        rest = self._drafter.propose(state.behind(ready.ids), gamma - len(ready))
        return replace(joined(ready, rest), ahead=len(ready))

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """See `Drafter.look_ahead`: behind the likeliest verdicts, as many as there is room for."""
        prefix = state.ids
        began = perf_counter()
        self._ahead, self._left = [], None
        if until() or not (likely := self.likely(chunk)):
            return
        whole = np.concatenate((prefix, chunk.ids))
        prefixes = [_behind(prefix, chunk, guess) for guess in likely if guess.accepted < len(chunk)]
        self._ahead = self._drafter.draft_many(
            state, prefixes, max(gamma, FAR), until, whole=whole, tail=len(likely) - len(prefixes)
        )
        self._seconds = perf_counter() - began

    def likely(self, chunk: Chunk) -> list[PredictedVerdict]:
        """Return the verdicts on a chunk that are followed, likeliest first. Behind the whole chunk a guess stands
        for one of the likeliest tokens there, by rank, and its own token is not a real one. Empty for a chunk
        without alternatives."""
        if chunk.alternatives is None:
            return []
        positions = self._rejection(chunk.confidence.tolist())
        if self._is_eog(int(chunk.ids[-1])):
            positions[-1] = 0.0  # behind the end there is nothing to guess
        found = guesses(positions, chunk.confidence, [*chunk.alternatives, _BEHIND], 2 * self._branches)
        found = [guess for guess in found if guess.probability > 0.0 and not self._is_eog(guess.token)]
        return found[: self._branches]

    def close(self) -> None:
        self._drafter.close()


def _behind(prefix: Ids, chunk: Chunk, guess: PredictedVerdict) -> Ids:
    return np.concatenate((prefix, chunk.ids[: guess.accepted], np.array([guess.token], dtype=np.int32)))


def first(chunk: Chunk, n: int) -> Chunk:
    """Return the first `n` tokens of a chunk, with all that is known of them."""
    return chunk if len(chunk) <= n else part(chunk, 0, n)


def part(chunk: Chunk, start: int, end: int) -> Chunk:
    """Return the tokens of a chunk from `start` to `end`, with all that is known of them."""
    here = slice(start, end)
    return replace(
        chunk,
        ids=chunk.ids[here],
        confidence=chunk.confidence[here],
        margin=chunk.margin[here],
        importance=chunk.importance[here],
        distributions=None if chunk.distributions is None else chunk.distributions[here],
        exit_layers=None if chunk.exit_layers is None else chunk.exit_layers[here],
        alternatives=None if chunk.alternatives is None else chunk.alternatives[here],
        context_match=None if chunk.context_match is None else _slice(chunk.context_match, here),
        tail=min(end - start, max(0, chunk.tail - (len(chunk) - end))),
    )


def joined(one: Chunk, other: Chunk) -> Chunk:
    """Return two chunks of one drafter as one."""
    return replace(
        one,
        ids=np.concatenate((one.ids, other.ids)),
        confidence=np.concatenate((one.confidence, other.confidence)),
        margin=np.concatenate((one.margin, other.margin)),
        importance=np.concatenate((_measured(one), _measured(other))),
        distributions=_both(one.distributions, other.distributions),
        exit_layers=_both(one.exit_layers, other.exit_layers),
        alternatives=_both(one.alternatives, other.alternatives),
        context_match=_together(one.context_match, other.context_match),
    )


def _slice(match: ContextMatch, here: slice) -> ContextMatch:
    return ContextMatch(match.said[here], match.matched[here], match.copied[here])


def _together(one: ContextMatch | None, other: ContextMatch | None) -> ContextMatch | None:
    if one is None or other is None:
        return None
    return ContextMatch(
        np.concatenate((one.said, other.said)),
        np.concatenate((one.matched, other.matched)),
        np.concatenate((one.copied, other.copied)),
    )


def _measured(chunk: Chunk) -> Floats:
    """Return the importance of a chunk's tokens, 0 where it was not measured."""
    return chunk.importance if len(chunk.importance) else np.zeros(len(chunk), dtype=np.float32)


def _both(one: tuple[T, ...] | None, other: tuple[T, ...] | None) -> tuple[T, ...] | None:
    return None if one is None or other is None else (*one, *other)


_BEHIND = (
    np.arange(-ALTERNATIVES, 0, dtype=np.int32),
    np.array([0.80, 0.06, 0.02, 0.01] + [0.005] * (ALTERNATIVES - 4), dtype=np.float32),
)
"""Behind a chunk that is accepted whole: its last token's successors are not computed yet when branches are shared out,
so these stand for the likeliest tokens there, with their usual chances."""

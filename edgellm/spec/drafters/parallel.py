"""Stall-free parallel inference (Synera, section 4.4): drafting after predicted verdicts while waiting for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

import numpy as np

from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.verdict_prediction import (
    MAX_AHEAD,
    PredictedVerdict,
    PredictionStats,
    alternatives,
    predict_verdicts,
)
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Probabilities
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, ContextMatch, Floats, Ids, Round

T = TypeVar("T")
ALTERNATIVES = 15
"""Candidates for the verifier's token at each place; the paper has three, and follows one."""


class ParallelDrafter(Drafter):
    """A drafter that continues drafting while waiting for a verdict, and keeps the drafts if the prediction was
    right."""

    def __init__(
        self,
        drafter: ModelDrafter,
        *,
        is_eog: Callable[[int], bool],
        rejection: Callable[[Sequence[float]], Probabilities],
        branches: int | None = None,
        acceptance: ConfidenceAcceptance | None = None,
    ) -> None:
        """Follow `branches` guesses at once, by default as many as `drafter` has room for; `rejection` predicts from
        the confidence of a chunk's tokens where it will be rejected, as `verdict_prediction.rejection` does.
        `acceptance` learns from the verdicts."""
        max_branches = drafter.max_branches
        self._drafter, self._rejection, self._is_eog = drafter, rejection, is_eog
        self._branches = max_branches if branches is None else min(branches, max_branches)
        self._ahead: list[tuple[Ids, Chunk]] = []
        self._leftover: tuple[Ids, Chunk] | None = None  # the rest of the kept branch, beyond the chunk
        self._seconds = 0.0
        self._acceptance = acceptance
        self.guessed = PredictionStats()

    def begin(self, state: GenerationState) -> None:
        self._drafter.begin(state)

    def end(self) -> None:
        self._drafter.end()

    def observe(self, state: GenerationState, turn: Round) -> None:
        self._drafter.observe(state, turn)
        if self._acceptance is not None and turn.verdict is not None:
            self._acceptance.observe(turn.chunk, turn.verdict.accepted)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk. Tokens that were drafted ahead behind exactly this text are taken over."""
        prefix = state.ids
        ready = next((chunk for known, chunk in self._ahead if len(chunk) and np.array_equal(known, prefix)), None)
        if self._ahead:
            self.guessed.record(ready is not None, self._seconds)
        elif self._leftover is not None and np.array_equal(self._leftover[0], prefix):
            ready = self._leftover[1]
        self._ahead, self._leftover = [], None
        if ready is None:
            return self._drafter.propose(state, gamma)
        doubtful = np.flatnonzero(ready.confidence[:gamma] < state.rules.stop_below)
        n = int(doubtful[0]) + 1 if len(doubtful) else gamma
        if len(ready) > n:
            self._leftover = np.concatenate((prefix, ready.ids[:n])), sliced(ready, n, len(ready))
            ready = sliced(ready, 0, n)
        if len(ready) == n or self._is_eog(int(ready.ids[-1])):
            return replace(ready, ahead=len(ready))
        rest = self._drafter.propose(state.with_draft(ready.ids), gamma - len(ready))
        return replace(joined(ready, rest), ahead=len(ready))

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft behind the likeliest verdicts, as many as there is room for."""
        prefix = state.ids
        began = perf_counter()
        whole = np.concatenate((prefix, chunk.ids))
        drafted = self._drafted_behind(whole)
        self._ahead, self._leftover = [], None
        if until() or not (predictions := self.predictions(prefix, chunk)):
            return
        prefixes = [_guessed_prefix(prefix, chunk, guess) for guess in predictions if guess.accepted < len(chunk)]
        tail = len(predictions) - len(prefixes)
        if drafted is None or not tail:
            self._ahead = self._drafter.draft_many(
                state, prefixes, max(gamma, MAX_AHEAD), until, whole=whole, tail=tail
            )
        else:
            (longest, more), *others = self._drafter.draft_many(
                state, [np.concatenate((whole, drafted.ids)), *prefixes], max(gamma, MAX_AHEAD), until,
                whole=whole, tail=tail - 1,
            )  # fmt: skip
            self._ahead = [(longest[: len(whole) + 1], joined(sliced(drafted, 1, len(drafted)), more)), *others]
        self._seconds = perf_counter() - began

    def _drafted_behind(self, whole: Ids) -> Chunk | None:
        """Return the tokens that were drafted ahead behind `whole`, in an earlier wait."""
        if self._leftover is None or not np.array_equal(self._leftover[0], whole):
            return None
        return self._leftover[1]

    def predictions(self, prefix: Ids, chunk: Chunk) -> list[PredictedVerdict]:
        """Return the predicted verdicts on a chunk behind `prefix`, likeliest first; empty for a chunk without logits.

        After the whole chunk, a prediction stands for the n-th likeliest next token, and its `token` is a placeholder.
        """
        if chunk.logits is None:
            return []
        positions = self._rejection(chunk.confidence.tolist())
        if self._is_eog(int(chunk.ids[-1])):
            positions[-1] = 0.0  # Nothing follows the end.
        candidates = [*alternatives(chunk, ALTERNATIVES, np.unique(prefix)), _BEHIND]
        found = predict_verdicts(positions, chunk.confidence, candidates, 2 * self._branches)
        found = [guess for guess in found if guess.probability > 0.0 and not self._is_eog(guess.token)]
        return found[: self._branches]

    def close(self) -> None:
        self._drafter.close()


def _guessed_prefix(prefix: Ids, chunk: Chunk, guess: PredictedVerdict) -> Ids:
    return np.concatenate((prefix, chunk.ids[: guess.accepted], np.array([guess.token], dtype=np.int32)))


def truncated(chunk: Chunk, n: int) -> Chunk:
    """Return the first `n` tokens of a chunk, with all that is known of them."""
    return chunk if len(chunk) <= n else sliced(chunk, 0, n)


def sliced(chunk: Chunk, start: int, end: int) -> Chunk:
    """Return the tokens of a chunk from `start` to `end`, with all that is known of them."""
    places = slice(start, end)
    return replace(
        chunk,
        ids=chunk.ids[places],
        confidence=chunk.confidence[places],
        margin=chunk.margin[places],
        importance=chunk.importance[places],
        exit_layers=None if chunk.exit_layers is None else chunk.exit_layers[places],
        logits=None if chunk.logits is None else chunk.logits[places],
        context_match=None if chunk.context_match is None else _sliced_match(chunk.context_match, places),
        tail=min(end - start, max(0, chunk.tail - (len(chunk) - end))),
    )


def joined(one: Chunk, other: Chunk) -> Chunk:
    """Return the concatenation of two chunks of one drafter."""
    return replace(
        one,
        ids=np.concatenate((one.ids, other.ids)),
        confidence=np.concatenate((one.confidence, other.confidence)),
        margin=np.concatenate((one.margin, other.margin)),
        importance=np.concatenate((_importance(one), _importance(other))),
        exit_layers=_joined_tuples(one.exit_layers, other.exit_layers),
        logits=_joined_tuples(one.logits, other.logits),
        context_match=_joined_matches(one.context_match, other.context_match),
    )


def _sliced_match(match: ContextMatch, places: slice) -> ContextMatch:
    return ContextMatch(match.tokens[places], match.matched[places], match.copied[places])


def _joined_matches(one: ContextMatch | None, other: ContextMatch | None) -> ContextMatch | None:
    if one is None or other is None:
        return None
    return ContextMatch(
        np.concatenate((one.tokens, other.tokens)),
        np.concatenate((one.matched, other.matched)),
        np.concatenate((one.copied, other.copied)),
    )


def _importance(chunk: Chunk) -> Floats:
    """Return the importance of a chunk's tokens, 0 where it was not measured."""
    return chunk.importance if len(chunk.importance) else np.zeros(len(chunk), dtype=np.float32)


def _joined_tuples(one: tuple[T, ...] | None, other: tuple[T, ...] | None) -> tuple[T, ...] | None:
    return None if one is None or other is None else (*one, *other)


_BEHIND = (
    np.arange(-ALTERNATIVES, 0, dtype=np.int32),
    np.array([0.80, 0.06, 0.02, 0.01] + [0.005] * (ALTERNATIVES - 4), dtype=np.float32),
)
"""Placeholders for the likeliest tokens after a wholly accepted chunk, with usual probabilities: the tokens are not
computed yet when branches are allotted."""

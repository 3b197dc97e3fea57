"""In-context distribution calibration: the model's own expectations behind each token of the context (CoordGen, 3.3).

While the prompt is prefilled the model predicts the next token at every position. These predictions are closer to what
it will write than the context's own words are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.ngram.sources import NOTHING, SILENT, ContextIndex, Cursor, Offer
from edgellm.spec.types import Expected

FLOOR = 0.1
"""Expected tokens of less probability are not drafted."""


@dataclass(frozen=True, slots=True)
class CalibratedNode:
    """A token of the calibrated tree, its probability where it stands, and what may follow."""

    token: int
    probability: float
    children: tuple[CalibratedNode, ...] = ()


class Calibration:
    """A source: the token tree that sampling and searching grow, read along one branch.

    Only the branch that is asked for is grown: from a position to the token expected there (sample), to where that
    occurs in the context, nearest behind first (search), and on from there.
    """

    def __init__(self, context: ContextIndex, owns: bool = False) -> None:
        """Use `context` to find where the reply's end occurs; it is a source of its own, which comes first, or this
        source `owns` it."""
        self._context, self._owns = context, owns
        self._ids: list[list[int]] = []
        self._probs: list[list[float]] = []
        self._places: dict[int, list[int]] = {}
        self._prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        """Keep what is known of the positions that `prompt` shares with the last one, as a cache does."""
        if self._owns:
            self._context.begin(prompt)
        same = common_prefix(np.asarray(self._prompt, np.int32), np.asarray(prompt, np.int32))
        del self._ids[same:], self._probs[same:]
        self._prompt = prompt
        self._places = {}
        for at, token in enumerate(prompt):
            self._places.setdefault(token, []).append(at)

    def expect(self, expected: Expected) -> None:
        """Take in the model's predictions behind the prompt's positions; they come in order, and may come again."""
        missing = expected.start - len(self._ids)
        if missing < 0:
            del self._ids[expected.start :], self._probs[expected.start :]
        self._ids += [[]] * missing
        self._probs += [[]] * missing
        self._ids += expected.ids.tolist()
        self._probs += expected.probs.tolist()

    def extend(self, tokens: Sequence[int]) -> None:
        """Extend the context with `tokens`, if this source owns it; the tree stays that of the prompt."""
        if self._owns:
            self._context.extend(tokens)

    def cursor(self) -> Cursor:
        if not self._ids:
            return SILENT
        automaton = self._context.automaton
        state = automaton.seen
        matched = automaton.length[state]
        return CalibratedCursor(self, automaton.end[state] if matched else -1, matched)

    def at(self, place: int) -> tuple[int, float]:
        """Return the token expected behind `place`, and its probability; (-1, 0) if nothing likely is known."""
        if not 0 <= place < len(self._ids) or not self._ids[place] or self._probs[place][0] < FLOOR:
            return -1, 0.0
        return self._ids[place][0], self._probs[place][0]

    def search(self, place: int, token: int) -> int:
        """Return where `token` occurs in the prompt: right behind `place`, else next behind it, else first; -1 if
        nowhere."""
        places = self._places.get(token)
        if places is None:
            return -1
        next_one = bisect_right(places, place)
        return places[next_one] if next_one < len(places) else places[0]

    def tree(self, place: int, depth: int) -> tuple[CalibratedNode, ...]:
        """Return the tree behind `place`, `depth` tokens deep: every token expected there above the floor, the
        likeliest first."""
        if depth <= 0 or not 0 <= place < len(self._ids):
            return ()
        likely = [
            (token, chance)
            for token, chance in zip(self._ids[place], self._probs[place], strict=True)
            if chance >= FLOOR
        ]
        return tuple(
            CalibratedNode(token, chance, self.tree(self.search(place, token), depth - 1)) for token, chance in likely
        )


class CalibratedCursor:
    """A cursor on the branch of the tree on which each token is the likeliest."""

    __slots__ = ("_calibration", "_matched", "_place")

    def __init__(self, calibration: Calibration, place: int, matched: int) -> None:
        self._calibration, self._place, self._matched = calibration, place, matched

    def offer(self) -> Offer:
        token, chance = self._calibration.at(self._place)
        return (token, self._matched, chance) if token >= 0 else NOTHING

    def advance(self, token: int) -> None:
        before = self._place
        self._place = self._calibration.search(before, token)
        self._matched = self._matched + 1 if 0 <= before == self._place - 1 else 1

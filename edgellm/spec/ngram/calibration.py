"""In-context distribution calibration (CoordGen, section 3.3): drafts from the model's own predictions at each prompt
position.

The model predicts the next token at every position while it prefills the prompt. These predictions are closer to its
reply than the prompt's own words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.ngram.sources import NO_CURSOR, NOTHING, ContextIndex, Cursor, DraftSource, Offer
from edgellm.spec.types import Expected

FLOOR = 0.1
"""Expected tokens of less probability are not drafted."""


@dataclass(frozen=True, slots=True)
class CalibratedNode:
    """A token of the calibrated tree, its probability there, and its possible successors."""

    token: int
    probability: float
    children: tuple[CalibratedNode, ...] = ()


class Calibration(DraftSource):
    """A source: the calibrated token tree, read along one branch.

    Only the requested branch is grown: from a position to the token predicted there (sample), to the next place where
    that occurs in the context (search), and so on.
    """

    def __init__(self, context: ContextIndex, owns: bool = False) -> None:
        """Find the reply's end in `context`, which is a source of its own that comes first, unless this source `owns`
        it."""
        self._context, self._owns = context, owns
        self._ids: list[list[int]] = []
        self._probs: list[list[float]] = []
        self._places: dict[int, list[int]] = {}
        self._prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        """Keep the predictions for the prefix that `prompt` shares with the last one."""
        if self._owns:
            self._context.begin(prompt)
        same = common_prefix(np.asarray(self._prompt, np.int32), np.asarray(prompt, np.int32))
        del self._ids[same:], self._probs[same:]
        self._prompt = prompt
        self._places = {}
        for at, token in enumerate(prompt):
            self._places.setdefault(token, []).append(at)

    def expect(self, expected: Expected) -> None:
        """Record the model's predictions at positions of the prompt, in order; positions may be repeated."""
        missing = expected.start - len(self._ids)
        if missing < 0:
            del self._ids[expected.start :], self._probs[expected.start :]
        self._ids += [[]] * missing
        self._probs += [[]] * missing
        self._ids += expected.ids.tolist()
        self._probs += expected.probs.tolist()

    @property
    def matched(self) -> int:
        return self._context.matched if self._ids else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Extend the context with `tokens`, if this source owns it; the tree stays that of the prompt."""
        if self._owns:
            self._context.extend(tokens)

    def cursor(self) -> Cursor:
        if not self._ids:
            return NO_CURSOR
        automaton = self._context.automaton
        state = automaton.seen
        matched = automaton.length[state]
        return CalibratedCursor(self, automaton.end[state] if matched else -1, matched)

    def expected(self, place: int) -> tuple[int, float]:
        """Return the token expected behind `place`, and its probability; (-1, 0) if nothing likely is known."""
        if not 0 <= place < len(self._ids) or not self._ids[place] or self._probs[place][0] < FLOOR:
            return -1, 0.0
        return self._ids[place][0], self._probs[place][0]

    def search(self, place: int, token: int) -> int:
        """Return where `token` occurs in the prompt: the next place after `place`, else the first; -1 if nowhere."""
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
        token, chance = self._calibration.expected(self._place)
        return (token, self._matched, chance) if token >= 0 else NOTHING

    def advance(self, token: int) -> None:
        before = self._place
        self._place = self._calibration.search(before, token)
        self._matched = self._matched + 1 if 0 <= before == self._place - 1 else 1

"""In-context distribution calibration (CoordGen, section 3.3): drafts from the model's own predictions at each prompt
position.

The model predicts the next token at every position while it prefills the prompt. These predictions are closer to its
reply than the prompt's own words. Of the paper's token tree, only the likeliest branch is grown, and read: from a
position to the token predicted there (sample), to the next place where that occurs in the prompt (search), and so on.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.ngram.sources import NOTHING, ContextIndex, Cursor, DraftSource, Guess
from edgellm.spec.types import Expected
from edgellm.spec.verification import LIKELY


class Calibration(DraftSource):
    """A source: the calibrated token tree, read along one branch."""

    def __init__(self, context: ContextIndex, owns: bool = False) -> None:
        """Find the reply's end in `context`, which is a source of its own that comes first, unless this source `owns`
        it."""
        self._context, self._owns = context, owns
        self._expected: list[tuple[int, float]] = []  # for each place, the likeliest token behind it, and its chance
        self._places: dict[int, list[int]] = {}
        self._prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        """Keep the predictions for the prefix that `prompt` shares with the last one."""
        if self._owns:
            self._context.begin(prompt)
        del self._expected[common_prefix(np.asarray(self._prompt, np.int32), np.asarray(prompt, np.int32)) :]
        self._prompt, self._places = prompt, {}
        for at, token in enumerate(prompt):
            self._places.setdefault(token, []).append(at)

    def expect(self, expected: Expected) -> None:
        """Record the model's predictions at positions of the prompt, in order; positions may be repeated."""
        del self._expected[expected.start :]
        self._expected += [(-1, 0.0)] * (expected.start - len(self._expected))
        self._expected += zip(expected.ids.tolist(), expected.probs.tolist(), strict=True)

    @property
    def matched(self) -> int:
        return self._context.matched if self._expected else 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Extend the context with `tokens`, if this source owns it; the tree stays that of the prompt."""
        if self._owns:
            self._context.extend(tokens)

    def cursor(self) -> Cursor | None:
        if not self._expected:
            return None
        automaton = self._context.automaton
        matched = automaton.length[automaton.seen]
        return CalibratedCursor(self, automaton.end[automaton.seen] if matched else -1, matched)

    def expected(self, place: int) -> tuple[int, float]:
        """Return the token expected behind `place`, and its probability; the token -1 if no `LIKELY` one is known."""
        token, chance = self._expected[place] if 0 <= place < len(self._expected) else (-1, 0.0)
        return (token if chance >= LIKELY else -1), chance

    def search(self, place: int, token: int) -> int:
        """Return where `token` occurs in the prompt: the next place after `place`, else the first; -1 if nowhere."""
        places = self._places.get(token, [-1])
        following = bisect_right(places, place)
        return places[following] if following < len(places) else places[0]


class CalibratedCursor:
    """A cursor on the branch of the tree on which each token is the likeliest."""

    __slots__ = ("_calibration", "_matched", "_place")

    def __init__(self, calibration: Calibration, place: int, matched: int) -> None:
        self._calibration, self._place, self._matched = calibration, place, matched

    def offer(self) -> Guess:
        token, chance = self._calibration.expected(self._place)
        return Guess(token, self._matched, chance) if token >= 0 else NOTHING

    def advance(self, token: int) -> None:
        before = self._place
        self._place = self._calibration.search(before, token)
        self._matched = self._matched + 1 if 0 <= before == self._place - 1 else 1

"""The text that a reply's JSON schema leaves no choice about, as a source of drafts."""

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.spec.drafting.acceptance import MAX_MATCH
from edgellm.spec.ngram.sources import Cursor, DraftSource, ListCursor
from edgellm.spec.types import NO_IDS, Ids


class ForcedText(DraftSource):
    """A source: names of properties, and what stands between them. Only its division into tokens is a guess, which the
    model may make otherwise."""

    def __init__(self, forced: Callable[[Ids], Sequence[int]]) -> None:
        """Create the source; `forced` returns the tokens of the only text that may follow a text (n,)."""
        self._forced = forced

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = NO_IDS
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._text = np.concatenate((self._text, np.array(tokens, dtype=np.int32)))
        self._next = self._forced(self._text)

    @property
    def matched(self) -> int:
        return MAX_MATCH if self._next else 0

    def cursor(self) -> Cursor | None:
        return ListCursor(self._next, MAX_MATCH) if self._next else None

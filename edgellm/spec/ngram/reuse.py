"""Draft reuse (CoordGen, section 3.4 and equation 3): the plausible rest of a rejected draft."""

from collections.abc import Callable, Sequence

from edgellm.spec.ngram.sources import Cursor, DraftSource, ListCursor
from edgellm.spec.types import Chunk, Verdict


def plausible_segment(plausible: Sequence[bool], rejected: int) -> tuple[int, int]:
    """Return the longest run of plausible drafted tokens from place `rejected` on, as (begin, end); of equals the
    first, and an empty run without a plausible token.

    Equation 3: every token in it has at least the threshold's probability under the model.
    """
    best = begin = rejected
    length = 0
    for at in range(rejected, len(plausible) + 1):
        if at < len(plausible) and plausible[at]:
            continue
        if at - begin > length:
            best, length = begin, at - begin
        begin = at + 1
    return best, best + length


class Reuse(DraftSource):
    """A source: the rest of a rejected draft, offered after the correction.

    The offer begins at the end of a word, because the correction may be the beginning of another name.
    """

    def __init__(self, inside: Callable[[int], bool]) -> None:
        """Create the source; `inside` tells whether a token continues a word."""
        self._inside = inside
        self._rest: list[int] = []
        self._fresh = False

    def begin(self, prompt: Sequence[int]) -> None:  # noqa: ARG002
        self._rest = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Drop the segment's tokens that were committed; those before the correction do not belong to it."""
        for token in tokens[-1:] if self._fresh else tokens:
            if self._rest and self._rest[0] == token:
                del self._rest[0]
        self._fresh = False

    @property
    def matched(self) -> int:
        """Return the length of the segment, which stands right behind the text."""
        return len(self._rest)

    def observe(self, chunk: Chunk, verdict: Verdict) -> None:
        if chunk.retrieved:
            self.rejected(chunk.ids.tolist(), verdict.accepted, verdict.plausible)

    def rejected(self, draft: Sequence[int], accepted: int, plausible: Sequence[bool] | None) -> None:
        """Record that the first `accepted` tokens of `draft` were accepted; `plausible` tells which tokens the model
        finds likely."""
        begin, end = (accepted, len(draft)) if plausible is None else plausible_segment(plausible, accepted)
        begin = max(begin, accepted + 1)  # The place `accepted` belongs to the correction.
        while begin < end and self._inside(draft[begin]):
            begin += 1  # The rejected word's rest goes, too.
        if accepted < len(draft):
            self._rest, self._fresh = list(draft[begin:end]), begin < end

    def cursor(self) -> Cursor | None:
        return ListCursor(self._rest, 1) if self._rest else None

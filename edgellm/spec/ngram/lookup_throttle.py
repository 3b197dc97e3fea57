"""The decision whether to look for something to copy at all: a lookup takes a tenth of a small verifier's time."""

from __future__ import annotations

SHARE = 0.005
"""Share of the time that may go into lookups while they do not pay, to notice when they begin to."""
FIRST = 4
"""Lookups at the beginning of every reply, whatever earlier ones brought: it is about something else."""
TRIED = 32
"""Lookups that are needed to judge by."""
_FEW = 1 / 16  # weight of the last lookup


class LookupThrottle:
    """The time that recent lookups took and saved, in seconds, kept from reply to reply.

    While they save less than they take, a lookup is paid for out of `SHARE` of the time: a verifier that takes long for
    a token always has that much, a quick one rests for some tokens between two lookups.
    """

    def __init__(self) -> None:
        self._taken = self._brought = 0.0
        self._seen = 0
        self._saved = 0.0  # seconds that may be spent
        self._first = FIRST

    def begin(self) -> None:
        """Allow the first lookups of a new reply."""
        self._first = FIRST

    @property
    def due(self) -> bool:
        """Return whether to look now."""
        if self._first or self._seen < TRIED or self._brought >= self._taken:
            return True
        return self._saved >= self._taken

    def passed(self, seconds: float) -> None:
        """Add the share of a round's `seconds` to the time that may be spent."""
        self._saved = min(self._saved + SHARE * seconds, FIRST * self._taken)

    def looked(self, seconds: float, brought: float) -> None:
        """Take in that a lookup took `seconds`, and that its draft saved `brought` seconds: negative if it was
        rejected."""
        self._first = max(0, self._first - 1)
        self._saved = max(0.0, self._saved - seconds)
        weight = max(_FEW, 1.0 / (self._seen + 1.0))
        self._seen += 1
        self._taken += weight * (seconds - self._taken)
        self._brought += weight * (brought - self._brought)

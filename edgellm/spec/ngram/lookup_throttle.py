"""Whether to look for something to copy at all: that takes time, too, beside a small verifier a tenth of it."""

from __future__ import annotations

SHARE = 0.005
"""Of the time, that may go into looking while it does not pay, to notice when it begins to."""
FIRST = 4
"""Looks at the beginning of every reply, whatever became of earlier ones: it is about something else."""
TRIED = 32
"""Looks that are judged by, at the least."""
_FEW = 1 / 16  # weight of the last look


class Looks:
    """What looks took and brought of late, in seconds, kept from reply to reply.

    While they bring less than they take, a look is paid for out of `SHARE` of the time: a verifier that takes long for
    a token always has that much, a quick one rests for some tokens between two looks.
    """

    def __init__(self) -> None:
        self._taken = self._brought = 0.0
        self._seen = 0
        self._saved = 0.0  # seconds that may be spent
        self._first = FIRST

    def begin(self) -> None:
        """A reply begins."""
        self._first = FIRST

    @property
    def due(self) -> bool:
        """Whether to look now."""
        if self._first or self._seen < TRIED or self._brought >= self._taken:
            return True
        return self._saved >= self._taken

    def passed(self, seconds: float) -> None:
        """A round took so long."""
        self._saved = min(self._saved + SHARE * seconds, FIRST * self._taken)

    def looked(self, seconds: float, brought: float) -> None:
        """A look took `seconds`, and what it found saved `brought` seconds: less than none, where it was rejected."""
        self._first = max(0, self._first - 1)
        self._saved = max(0.0, self._saved - seconds)
        weight = max(_FEW, 1.0 / (self._seen + 1.0))
        self._seen += 1
        self._taken += weight * (seconds - self._taken)
        self._brought += weight * (brought - self._brought)

"""The start of another device's clock on this one's: Cristian's algorithm (1989) over messages that come anyway."""

from __future__ import annotations

from time import perf_counter

_DRIFT = 1e-4  # seconds per second by which two clocks may drift apart: five times a crystal's data-sheet value


class StageClock:
    """The moment at which a stage's clock stood at 0, within the bounds that its messages set.

    A message that says `at` and arrives now was written earlier, so the clock began before now - `at`; an answer to a
    message sent at `sent` was written later than `sent`. Each message narrows the two bounds, and drift widens them.
    """

    def __init__(self) -> None:
        """Note the time: the stage is requested now, so its clock begins later."""
        self._asked = perf_counter()
        self._latest: tuple[float, float] | None = None  # the bound, and when it was found
        self._earliest: tuple[float, float] | None = None

    def heard(self, at: float, sent: float | None = None) -> None:
        """Take in a message written `at` seconds on the stage's clock that has just arrived; `sent` is when the message
        that it answers left, if that is known."""
        now, at = perf_counter(), max(0.0, at)
        if self._latest is None or now - at < self._latest[0] + _DRIFT * (now - self._latest[1]):
            self._latest = now - at, now
        if sent is not None and (
            self._earliest is None or sent - at > self._earliest[0] - _DRIFT * (now - self._earliest[1])
        ):
            self._earliest = sent - at, now

    @property
    def began(self) -> float:
        """The middle between both bounds, or the later bound while there is no answer; never before the request."""
        if self._latest is None:
            return self._asked
        latest = self._latest[0]
        earliest = latest if self._earliest is None else min(self._earliest[0], latest)
        return max(self._asked, (earliest + latest) / 2)

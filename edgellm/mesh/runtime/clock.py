"""When another device's clock began, by this one: Cristian's algorithm (1989) over the messages that come anyway."""

from __future__ import annotations

from time import perf_counter

_DRIFT = 1e-4  # seconds a second, by which two clocks may part: five times what a crystal's data sheet allows


class StageClock:
    """The moment at which a stage's clock stood at 0, between what its messages allow.

    A message that says `at` and arrives now was written earlier, so the clock began before now - `at`; an answer to
    what was sent at `sent` was written later than that. The two are narrowed with each message and parted by drift.
    """

    def __init__(self) -> None:
        """It is asked for now, and begins later."""
        self._asked = perf_counter()
        self._latest: tuple[float, float] | None = None  # the bound, and when it was found
        self._earliest: tuple[float, float] | None = None

    def heard(self, at: float, sent: float | None = None) -> None:
        """Take in a message that was written `at` seconds on the stage's clock and has just arrived; as an answer to
        what left at `sent`, where that is known."""
        now, at = perf_counter(), max(0.0, at)
        if self._latest is None or now - at < self._latest[0] + _DRIFT * (now - self._latest[1]):
            self._latest = now - at, now
        if sent is not None and (
            self._earliest is None or sent - at > self._earliest[0] - _DRIFT * (now - self._earliest[1])
        ):
            self._earliest = sent - at, now

    @property
    def began(self) -> float:
        """The middle of what is possible; without an answer to anything, the latest. Never before it was asked for."""
        if self._latest is None:
            return self._asked
        latest = self._latest[0]
        earliest = latest if self._earliest is None else min(self._earliest[0], latest)
        return max(self._asked, (earliest + latest) / 2)

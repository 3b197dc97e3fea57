"""The time that a device waits for one verdict, whatever the verifier says meanwhile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerdictWork:
    """What a verifier has to do for a verdict: read `unseen` tokens, and take up to `passes` passes of its model."""

    unseen: int
    passes: int


class VerdictDeadline:
    """A limit for one verdict, from the fastest that came before. Belongs to a connection and its thread.

    The fastest, and not the usual ones: else a verifier that slows down by degrees would never be too slow. After a
    verdict that did not come in time the next limit is twice as long, up to four times, until one comes: a verifier
    that has become slower for good is not given up for good.
    """

    def __init__(self, least: float) -> None:
        """Start without a measurement; no limit is below `least` seconds."""
        self._least = least
        self._pass: float | None = None  # seconds of a pass with few tokens
        self._missed = 0

    def came(self, work: VerdictWork, seconds: float) -> None:
        """Record that a verdict took `seconds`."""
        self._missed = 0
        if work.unseen <= FEW:
            known = SLOWEST_PASS if self._pass is None else self._pass
            self._pass = min(known, seconds / work.passes)

    def missed(self) -> None:
        """Record that a verdict did not come within the limit."""
        self._missed = min(self._missed + 1, 2)

    def limit(self, work: VerdictWork) -> float:
        """Return the seconds after which the device goes on alone."""
        one = UNKNOWN_PASS if self._pass is None else self._pass
        usual = work.passes * one + max(0, work.unseen - FEW) * min(one, SLOWEST_TOKEN)
        seconds = max(self._least, TIMES * usual) * (1 << self._missed)
        if self._pass is None:  # its model may still have to come from its disk
            seconds += FIRST_SECONDS
        return min(seconds, MOST_SECONDS)


TIMES = 5.0  # a verdict may take this many times its expected time
FIRST_SECONDS = 25.0
MOST_SECONDS = 600.0
UNKNOWN_PASS = 1.0  # seconds, until one was measured
SLOWEST_PASS = 6.0  # no slower one is believed
SLOWEST_TOKEN = 0.05  # of a long prompt: no token takes longer than a pass, and none longer than that
FEW = 32  # tokens that make a pass hardly longer

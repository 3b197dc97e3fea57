"""How long to wait for a verifier across a link: for one verdict, and before it is asked again."""

from __future__ import annotations

import random
from dataclasses import dataclass

SLACK_FACTOR = 5.0  # a verdict may take this many times its expected time
FIRST_SECONDS = 25.0
MAX_SECONDS = 600.0
UNKNOWN_PASS = 1.0  # seconds, until one was measured
SLOWEST_PASS = 6.0  # slower measurements are not believed
SLOWEST_TOKEN = 0.05  # of a long prompt: no token takes longer than a pass, and none longer than that
FEW_TOKENS = 32  # up to this number, tokens hardly prolong a pass


@dataclass(frozen=True, slots=True)
class VerdictWork:
    """The work of a verdict for the verifier: reading `unseen` tokens, and up to `passes` passes of its model."""

    unseen: int
    passes: int


class VerdictDeadline:
    """A time limit for one verdict, from the fastest so far. Belongs to a connection and its thread.

    A limit from typical times would follow a verifier that slows down gradually. After a verdict that missed its limit,
    the next limit is twice as long, up to four times, until one arrives: a verifier that has become slower for good is
    used again.
    """

    def __init__(self, minimum: float) -> None:
        """Start without a measurement; no limit is below `minimum` seconds."""
        self._minimum = minimum
        self._pass: float | None = None  # seconds of a pass with few tokens
        self._missed = 0

    def record(self, work: VerdictWork, seconds: float) -> None:
        """Record that a verdict took `seconds`."""
        self._missed = 0
        if work.unseen <= FEW_TOKENS:
            known = SLOWEST_PASS if self._pass is None else self._pass
            self._pass = min(known, seconds / work.passes)

    def record_miss(self) -> None:
        """Record that a verdict did not arrive within the limit."""
        self._missed = min(self._missed + 1, 2)

    def limit(self, work: VerdictWork) -> float:
        """Return the seconds after which the device continues alone."""
        pass_seconds = UNKNOWN_PASS if self._pass is None else self._pass
        expected = work.passes * pass_seconds + max(0, work.unseen - FEW_TOKENS) * min(pass_seconds, SLOWEST_TOKEN)
        seconds = max(self._minimum, SLACK_FACTOR * expected) * (1 << self._missed)
        if self._pass is None:  # its model may still have to come from its disk
            seconds += FIRST_SECONDS
        return min(seconds, MAX_SECONDS)


class RetryDelay:
    """The seconds before the next try: `first` behind a loss, doubled up to `most`, shortened at random by up to a
    half."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._failures = 0
        self._jitter = random.Random()

    def next(self) -> float:
        """Return the next delay, which is longer from failure to failure."""
        longest = min(self._first * 2.0**self._failures, self._most)
        self._failures = min(self._failures + 1, 16)
        return longest * self._jitter.uniform(0.5, 1.0)

    def asked(self, seconds: float) -> float:
        """Return how long to wait for who asked for `seconds`: a little longer, at random, so that not all devices come
        back at once."""
        return seconds * self._jitter.uniform(1.0, 1.25)

    def reset(self) -> None:
        """Begin again with the first delay, as there was an answer."""
        self._failures = 0

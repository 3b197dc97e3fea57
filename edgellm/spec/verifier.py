"""Deadlines of verdicts, and the pauses before a verifier is asked again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, slots=True)
class VerdictWork:
    """The work of a verdict for the verifier: reading `unseen` tokens, and up to `passes` passes of its model."""

    unseen: int
    passes: int


class VerdictDeadline:
    """The deadline of a verdict, from the fastest verdict so far. Belongs to a connection and its thread.

    A limit from typical times would follow a verifier that slows down gradually. After a verdict that missed its limit,
    the next limit is twice as long, up to four times, until one arrives: a verifier that has become slower for good is
    used again.
    """

    slack = 5.0  # deadline over expected time of a verdict
    first_seconds, max_seconds = 25.0, 600.0  # added before a measurement; longest deadline
    unknown_pass = 1.0  # seconds of a pass before a measurement
    _slowest_token = 0.05  # most seconds of a prompt token, which is never slower than a pass
    _few_tokens = 32  # tokens that hardly prolong a pass

    def __init__(self, minimum: float) -> None:
        """Start without a measurement; no limit is below `minimum` seconds."""
        self._minimum = minimum
        self._pass: float | None = None  # seconds of a pass with few tokens
        self._missed = 0

    def record(self, work: VerdictWork, seconds: float) -> None:
        """Record that a verdict took `seconds`. A first one that took very long may have loaded the model."""
        self._missed = 0
        if work.unseen <= self._few_tokens:
            known = self.first_seconds / self.slack if self._pass is None else self._pass
            self._pass = min(known, seconds / work.passes)

    def record_miss(self) -> None:
        """Record that a verdict did not arrive within the limit."""
        self._missed = min(self._missed + 1, 2)

    def limit(self, work: VerdictWork) -> float:
        """Return the seconds after which the device continues alone."""
        pass_seconds = self.unknown_pass if self._pass is None else self._pass
        reading = max(0, work.unseen - self._few_tokens) * min(pass_seconds, self._slowest_token)
        seconds = max(self._minimum, self.slack * (work.passes * pass_seconds + reading)) * (1 << self._missed)
        if self._pass is None:  # The verifier may still have to load its model.
            seconds += self.first_seconds
        return min(seconds, self.max_seconds)


class RetryDelay:
    """An exponential back-off: `first` seconds, doubled up to `most`, with a random half as jitter; and the time before
    which nothing is asked."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._failures = 0
        self._not_before = 0.0
        self._jitter = random.Random()

    def next(self) -> float:
        """Return the next delay, which is longer from failure to failure."""
        longest = min(self._first * 2.0**self._failures, self._most)
        self._failures = min(self._failures + 1, 16)
        return longest * self._jitter.uniform(0.5, 1.0)

    def pause(self, seconds: float | None = None) -> float:
        """Pause for the requested `seconds`, or for the next delay; return the seconds. Requested pauses are prolonged
        at random, so that not all devices come back at once."""
        wait = self.next() if seconds is None else seconds * self._jitter.uniform(1.0, 1.25)
        self._not_before = max(self._not_before, monotonic() + wait)  # Several sessions may set a delay.
        return wait

    @property
    def left(self) -> float:
        """Return the remaining seconds of the pause, 0 without a pause."""
        return max(0.0, self._not_before - monotonic())

    def reset(self) -> None:
        """Begin again with the first delay, after an answer."""
        self._failures = 0

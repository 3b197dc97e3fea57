"""Fair sharing of a service between devices: places in the queue, and a pace."""

from __future__ import annotations

from collections import Counter
from time import monotonic

EVENTS_PER_SECOND = 50.0  # refill of a device's bucket
BURST = 128  # capacity of a bucket


class Queue:
    """The number of waiting requests of each device. Used by the network's thread alone."""

    def __init__(self, capacity: int) -> None:
        """Let at most `capacity` requests wait in all."""
        self._capacity = capacity
        self._waiting: Counter[str] = Counter()

    def full(self, device: str) -> bool:
        """Return whether `device` has used up its share of the queue, equal for all devices with waiting requests."""
        others = len(self._waiting) - (device in self._waiting)
        return self._waiting[device] >= self._capacity // (others + 1)

    def enter(self, device: str) -> None:
        """Count a request of `device` that starts to wait."""
        self._waiting[device] += 1

    def leave(self, device: str) -> None:
        """Count a request of `device` as answered or given up."""
        self._waiting -= Counter((device,))


class Pacing:
    """A token bucket per device for events that cost the network thread's time without a verdict: a session, *busy*, a
    missing prefix. Used by that thread alone."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}  # time when each device's bucket is full, the soonest first

    def delay(self, device: str) -> float:
        """Count one event, and return the seconds until `device` should be served."""
        now = monotonic()
        while self._full_at and (soonest := next(iter(self._full_at.items())))[1] <= now:
            del self._full_at[soonest[0]]
        full_at = max(now, self._full_at.pop(device, now)) + 1.0 / EVENTS_PER_SECOND
        self._full_at[device] = full_at
        return max(0.0, full_at - now - BURST / EVENTS_PER_SECOND)

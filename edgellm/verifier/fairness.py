"""Fair sharing of the verifier between devices: turns, places in the queue, and a pace (for slots see `SlotTable`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import monotonic
from typing import Protocol, TypeVar

RECENT = 30.0  # seconds that a device counts as active after its last request
EVENTS_PER_SECOND = 50.0  # refill of a device's bucket
BURST = 128  # capacity of a bucket


class TakesTurns(Protocol):
    """A request of a device; `turn` is the number of earlier requests of the same device."""

    turn: int

    @property
    def device(self) -> str: ...


T = TypeVar("T", bound=TakesTurns)


class DeviceTurns:
    """The order of requests by device: the least recently served first, a device's own in order of arrival. Used by
    the worker's thread alone."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # time of each active device's last request
        self._served: dict[str, int] = {}  # number of the last batch that served the device
        self._batches = 0

    def record_request(self, device: str) -> None:
        """Record a request of `device`."""
        self._asked[device] = monotonic()

    def several_devices(self) -> bool:
        """Return whether more than one device sent a request within the last `RECENT` seconds."""
        if len(self._asked) > 1:
            oldest = monotonic() - RECENT
            self._asked = {device: time for device, time in self._asked.items() if time >= oldest}
            self._served = {device: batch for device, batch in self._served.items() if device in self._asked}
        return len(self._asked) > 1

    def order(self, requests: Iterable[T]) -> list[T]:
        """Set the `turn` of each of `requests` (least recently served first); return them sorted by turn.

        The first turn has a request of each device, the second turn the second request, and so on.
        """
        counts: Counter[str] = Counter()
        ordered = list(requests)
        for request in ordered:
            request.turn = counts[request.device]
            counts[request.device] += 1
        return sorted(ordered, key=lambda request: (request.turn, self._served.get(request.device, 0)))

    def record_batch(self, devices: Iterable[str]) -> None:
        """Record a batch that served `devices`."""
        self._batches += 1
        self._served |= dict.fromkeys(devices, self._batches)


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

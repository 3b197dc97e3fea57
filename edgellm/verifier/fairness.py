"""Fair sharing of the verifier between devices: rows of a batch, and places in the queue (for slots see `SlotTable`).

Devices take turns, the least recently served first (round robin; a device's own requests in order of arrival). Synera's
Algorithm 1 alone knows only sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from time import monotonic
from typing import Protocol, TypeVar

from edgellm.verifier.judgement import Job
from edgellm.verifier.scheduler import ScheduledBatch, Scheduler, SchedulerLimits, next_batch

RECENT = 30.0  # seconds that a device counts as active after its last request


class TakesTurns(Protocol):
    """A request of a device."""

    turn: int
    """Number of earlier requests of the same device."""

    @property
    def device(self) -> str: ...


T = TypeVar("T", bound=TakesTurns)


class DeviceTurns:
    """The order of requests by device. Used by the worker's thread alone."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # time of each device's last request, the oldest first
        self._served: dict[str, int] = {}  # number of the last batch that served the device
        self._batches = 0

    def record_request(self, device: str) -> None:
        """Record a request of `device`."""
        self._asked.pop(device, None)
        self._asked[device] = monotonic()

    def several_devices(self) -> bool:
        """Return whether more than one device sent a request within the last `RECENT` seconds."""
        if len(self._asked) < 2:
            return False
        oldest = monotonic() - RECENT
        while self._asked and self._asked[device := next(iter(self._asked))] < oldest:
            del self._asked[device]
            self._served.pop(device, None)
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
        ordered.sort(key=lambda request: (request.turn, self._served.get(request.device, 0)))
        return ordered

    def record_batch(self, devices: Iterable[str]) -> None:
        """Record a batch that served `devices`."""
        self._batches += 1
        for device in devices:
            self._served[device] = self._batches


class PassCost:
    """The cost of a pass, a + b * weight seconds, fitted to the latest passes; the weight is the sum of
    `ScheduledSlice.weight`."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, weight: int, seconds: float) -> None:
        """Record a pass of this weight."""
        self._n = _DECAY * self._n + 1.0
        self._x = _DECAY * self._x + weight
        self._y = _DECAY * self._y + seconds
        self._xx = _DECAY * self._xx + weight * weight
        self._xy = _DECAY * self._xy + weight * seconds

    def budget(self, limits: SchedulerLimits) -> int:
        """Return the weight of a pass that takes little longer than a pass for one typical request.

        These are many rows if reading the model's weights from memory dominates, and few if computing dominates.
        """
        fixed = 0.0  # a / b: rows in the fixed time of a pass
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-6 * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
            base = (self._y - slope * self._x) / self._n
            fixed = base / slope if slope > 0.0 else float(limits.rows) if base > 0.0 else 0.0
        return min(limits.rows, int(_MAX_SLOWDOWN * _TYPICAL_WEIGHT + (_MAX_SLOWDOWN - 1.0) * max(0.0, fixed)))


class FairScheduler(Scheduler):
    """Algorithm 1 for a single active device; turns between several."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self._turns, self._cost = DeviceTurns(), PassCost()
        self._seconds = self._answers = 0.0  # decaying sums over the last passes

    def next(self, ready: Collection[Job], prefills: int, single_session: bool) -> ScheduledBatch[Job] | None:
        if self._turns.several_devices():
            budget = self._cost.budget(self.limits)
            return next_batch(self._turns.order(ready), self.limits, prefills, budget=budget)
        return super().next(ready, prefills, single_session)

    def on_request(self, job: Job) -> None:
        self._turns.record_request(job.device)

    def on_batch(self, batch: ScheduledBatch[Job], seconds: float, answered: int) -> None:
        self._cost.add(sum(piece.weight for piece in batch.slices), seconds)
        self._turns.record_batch({piece.request.device for piece in batch.slices})
        self._seconds = _DECAY * self._seconds + seconds
        self._answers = _DECAY * self._answers + answered

    def wait_seconds(self, requests: int) -> float:
        """Return the expected seconds until `requests` are answered."""
        if not self._answers:  # The first answer takes at least the time already spent.
            return requests * max(self._seconds, _INITIAL_SECONDS)
        return requests * self._seconds / self._answers


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
        self._waiting[device] -= 1
        if self._waiting[device] <= 0:
            del self._waiting[device]


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


EVENTS_PER_SECOND = 50.0  # refill of a device's bucket
BURST = 128  # capacity of a bucket
_DECAY = 0.98  # decay per pass: about the last fifty count
_TYPICAL_WEIGHT = 8  # weight of a typical request: a chunk of four or five tokens and the token before it
_MAX_SLOWDOWN = 1.25  # maximum time of a pass relative to a typical request, if several devices are active
_INITIAL_SECONDS = 0.1  # seconds per answer before a measurement

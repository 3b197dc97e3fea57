"""Fair shares of the verifier between devices: rows of a batch, and places in the queue (slots: `SlotTable`).

Devices are served by turns, the least recently served first (round robin; the requests of one device among themselves
as they come). Deleting this module would leave Synera's Algorithm 1, which knows sessions only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from time import monotonic
from typing import Protocol, TypeVar

from edgellm.verifier.requests import VerifyRequest
from edgellm.verifier.scheduler import ScheduledBatch, Scheduler, SchedulerLimits, next_batch

RECENT = 30.0  # seconds for which a device that has asked counts as one that may ask again at any time


class TakesTurns(Protocol):
    """A request of a device."""

    turn: int
    """Requests of the same device that go first."""

    @property
    def device(self) -> str: ...


T = TypeVar("T", bound=TakesTurns)


class DeviceTurns:
    """Orders requests by device. Used by the worker's thread alone."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # when each device asked last, the oldest first
        self._served: dict[str, int] = {}  # number of the last batch with something of it
        self._batches = 0

    def asked(self, device: str) -> None:
        """Note that a request of `device` has come."""
        self._asked.pop(device, None)
        self._asked[device] = monotonic()

    def shared(self) -> bool:
        """Return whether more than one device has asked within the last `RECENT` seconds."""
        if len(self._asked) < 2:
            return False
        oldest = monotonic() - RECENT
        while self._asked and self._asked[device := next(iter(self._asked))] < oldest:
            del self._asked[device]
            self._served.pop(device, None)
        return len(self._asked) > 1

    def order(self, requests: Iterable[T]) -> list[T]:
        """Note the `turn` of each of `requests` (least recently served first); return them by turn.

        The first turn has one request of each device, the second turn the second one of each, and so on.
        """
        before: Counter[str] = Counter()
        ordered = list(requests)
        for request in ordered:
            request.turn = before[request.device]
            before[request.device] += 1
        ordered.sort(key=lambda request: (request.turn, self._served.get(request.device, 0)))
        return ordered

    def served(self, devices: Iterable[str]) -> None:
        """Note that a batch had something of each of `devices`."""
        self._batches += 1
        for device in devices:
            self._served[device] = self._batches


class PassCost:
    """The cost of a pass, a + b * weight seconds, fitted to the latest passes; the weight is the sum of
    `ScheduledSlice.weight`."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, weight: int, seconds: float) -> None:
        """Take in that a pass of this weight took `seconds`."""
        self._n = _FADE * self._n + 1.0
        self._x = _FADE * self._x + weight
        self._y = _FADE * self._y + seconds
        self._xx = _FADE * self._xx + weight * weight
        self._xy = _FADE * self._xy + weight * seconds

    def budget(self, limits: SchedulerLimits) -> int:
        """Return the weight of a pass that takes little longer than a pass for one usual request.

        Where fetching the model's weights from memory dominates, which takes the same time for few rows and for many,
        that is many rows; where computing dominates, it is few.
        """
        fixed = 0.0  # a / b: the rows that could be computed in the time that every pass takes
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-6 * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
            base = (self._y - slope * self._x) / self._n
            fixed = base / slope if slope > 0.0 else float(limits.rows) if base > 0.0 else 0.0
        return min(limits.rows, int(_LONGER * _USUAL + (_LONGER - 1.0) * max(0.0, fixed)))


class FairScheduler(Scheduler):
    """Algorithm 1 while one device asks; by turns where several do."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.rate = ServiceRate()
        self._turns, self._cost = DeviceTurns(), PassCost()

    def next(
        self, ready: Collection[VerifyRequest], prefills: int, alone: bool
    ) -> ScheduledBatch[VerifyRequest] | None:
        """See `Scheduler.next`."""
        if not self._turns.shared():
            return super().next(ready, prefills, alone)
        return next_batch(self._turns.order(ready), self.limits, prefills, budget=self._cost.budget(self.limits))

    def shared(self) -> bool:
        """See `Scheduler.shared`."""
        return self._turns.shared()

    def arrived(self, request: VerifyRequest) -> None:
        """See `Scheduler.arrived`."""
        self._turns.asked(request.device)

    def computed(self, batch: ScheduledBatch[VerifyRequest], seconds: float, answered: int) -> None:
        """See `Scheduler.computed`."""
        self._cost.add(sum(piece.weight for piece in batch.slices), seconds)
        self._turns.served({piece.request.device for piece in batch.slices})
        self.rate.batch(seconds, answered)


class ServiceRate:
    """The time that an answer has taken lately: computing seconds and answers, where older ones count less and less."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._answers = 0.0

    def batch(self, seconds: float, answers: int) -> None:
        """Take in that a batch took `seconds` and answered `answers` requests."""
        self._seconds = _FADE * self._seconds + seconds
        self._answers = _FADE * self._answers + answers

    def seconds(self, requests: int) -> float:
        """Return how long it takes until `requests` are answered."""
        if not self._answers:  # none so far: an answer takes at least the time already spent
            return requests * max(self._seconds, _FIRST_GUESS)
        return requests * self._seconds / self._answers


class Queue:
    """The number of waiting requests of each device. Used by the network's thread alone."""

    def __init__(self, longest: int) -> None:
        """Let at most `longest` requests wait in all."""
        self._longest = longest
        self._waiting: Counter[str] = Counter()

    def full(self, device: str) -> bool:
        """Return whether `device` has used up its share of the queue: an even one between the devices with waiting
        requests."""
        others = len(self._waiting) - (device in self._waiting)
        return self._waiting[device] >= self._longest // (others + 1)

    def enter(self, device: str) -> None:
        """Count a request of `device` that begins to wait."""
        self._waiting[device] += 1

    def leave(self, device: str) -> None:
        """Count a request of `device` as answered or given up."""
        self._waiting[device] -= 1
        if self._waiting[device] <= 0:
            del self._waiting[device]


class Pacing:
    """A token bucket per device for events that cost the network's thread time and bring no verdict: a session,
    *busy*, a missing prefix. Used by that thread alone, which shares the interpreter with the worker's thread."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # when the bucket of each device is full again, the soonest first

    def delay(self, device: str) -> float:
        """Count one such event, and return the seconds for which `device` is not to be served."""
        now = monotonic()
        while self._due and (soonest := next(iter(self._due.items())))[1] <= now:
            del self._due[soonest[0]]
        due = max(now, self._due.pop(device, now)) + 1.0 / EVENTS
        self._due[device] = due
        return max(0.0, due - now - BURST / EVENTS)


EVENTS = 50.0  # per second, of one device
BURST = 128  # at once
_FADE = 0.98  # weight of a pass after each later one: about the last fifty are remembered
_USUAL = 8  # the weight of a usual request: a chunk of four or five tokens and the token before it
_LONGER = 1.25  # how many times as long as a pass for a usual request one may be, where several devices ask
_FIRST_GUESS = 0.1  # seconds for an answer, until one has been measured

"""The pipeline of stages, as the coordinator drives it, with a watch over each and a bound on its clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Protocol

import numpy as np

from edgellm.engine import Ids
from edgellm.errors import DeviceLost, EdgeError, ProtocolError
from edgellm.mesh.messages import (
    MOST_ROWS,
    Event,
    Failed,
    Forward,
    Loaded,
    MicroBatch,
    StageAnswer,
    StageLost,
    StageSpec,
    StageTrace,
    TraceSpan,
)
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.verifier.requests import VerifyRequest

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


IDLE_SECONDS = 60.0  # for which a request may be open while every device says that it has nothing to do
ANSWER_SECONDS = 300.0  # for each parcel of a request, once all layers are loaded
LOAD_SECONDS = 1800.0  # until the next piece is loaded
STOOD_SECONDS = 5.0  # between two checks, of which several come a second: a longer gap is a pause of this process


class OnTheWay:
    """The parcels sent through `stages` stages that are not answered yet. The owner locks it."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._known: dict[int, tuple[int, MicroBatch]] = {}  # by number: the furthest stage that it is known to be at
        self._highest = 0

    def sent(self, parcel: MicroBatch) -> None:
        """Remember a parcel that is given to the first stage."""
        self._known[parcel.number] = 0, parcel
        self._highest = max(self._highest, parcel.number)

    def passed(self, at: int, said: MicroBatch) -> MicroBatch | None:
        """Return the parcel for the next stage, when stage `at` says that a parcel has gone through it: the parcel as
        it was sent, with that stage's rows. None: the parcel is not waited for any more.

        Raises:
            ProtocolError: no such parcel was sent there, it has passed there already, or its rows have a wrong shape
                or values that are not finite.
        """
        if said.number > self._highest or at >= self._last:
            raise ProtocolError(f"Parcel {said.number} was never sent that way.", _UPDATE)
        if said.number not in self._known:
            return None
        before, parcel = self._known[said.number]
        if at < before:
            raise ProtocolError(f"Parcel {said.number} is passed on twice.", _UPDATE)
        if said.data.ndim != 2 or len(said.data) != len(parcel.data) or not np.isfinite(said.data).all():
            raise ProtocolError(
                f"Of {len(parcel.data)} positions come {len(said.data)} rows, or numbers that are none.",
                "The model's file on that device may be damaged: fetch it anew, or bring its layers again.",
            )
        self._known[said.number] = at + 1, parcel
        return replace(parcel, data=said.data)

    def over(self, numbers: Sequence[int]) -> None:
        """Forget these parcels: they are not waited for any more."""
        for number in numbers:
            self._known.pop(number, None)

    def slowest(self, numbers: Sequence[int]) -> int:
        """Return the first stage that has not passed on one of these parcels, as far as that can be seen from here."""
        return min((self._known[number][0] for number in numbers if number in self._known), default=self._last)


class Deadline:
    """A deadline for the oldest open request, whatever the devices say about their work."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._moved = self._busy = self._looked = clock()

    def moved(self) -> None:
        """Restart the time: a first request was sent, a request was settled, or a device has loaded layers."""
        self._moved = self._busy = self._looked = self._clock()

    def passed(self, parcels: int, loaded: bool, idle: bool) -> bool:
        """Return whether a request of `parcels` parcels is overdue. `loaded`: all layers are loaded; `idle`: every
        device says that it has nothing to do."""
        now = self._clock()
        if (stood := now - self._looked) > STOOD_SECONDS:  # this process itself was paused
            self._moved, self._busy = self._moved + stood, self._busy + stood
        self._looked = now
        if not (loaded and idle):
            self._busy = now
        longest = ANSWER_SECONDS * parcels if loaded else LOAD_SECONDS
        return now - self._moved > longest or now - self._busy > IDLE_SECONDS


_UPDATE = "Run the same version of edgellm on both sides."


Post = Callable[[Event], None]


class StageHost(Protocol):
    """A place at which a stage can be: this process, or a device across a link. None of its methods waits."""

    @property
    def name(self) -> str: ...

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:
        """Begin to load. `post` is called with every event, from any thread. Rows for the next seat, `after`, may be
        given to it directly, or else are posted as `Forward`. `waiting` tells whether an answer is waited for."""
        ...

    def put(self, parcel: MicroBatch) -> None: ...

    def expect(self, number: int, request: VerifyRequest) -> None:
        """Remember that the answer to parcel `number`, whoever delivers that parcel, is for `request`."""
        ...

    def tell(self, session: int) -> None:
        """Ask the stage to post its `StageTrace`."""
        ...

    def idle(self) -> bool:
        """Return whether the stage says that it has nothing to do."""
        ...

    def close(self) -> None:
        """Release the stage, which is not needed any more."""
        ...


class LocalSeat:
    """A stage in this process."""

    def __init__(self, name: str, shelf: WeightCache, threads: int | None = None) -> None:
        self.name, self._shelf, self._threads = name, shelf, threads
        self._stage: Stage | None = None
        self._post: Post | None = None

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:  # noqa: ARG002
        self._post = post
        try:
            self._stage = Stage(work, self._shelf, post, threads=self._threads)
            self._stage.start()
        except EdgeError as error:
            post(StageLost(error))

    def put(self, parcel: MicroBatch) -> None:
        try:
            if self._stage is not None:
                self._stage.put(parcel)
        except EdgeError as error:
            if self._post is not None:
                self._post(Failed(parcel.session, parcel.number, error))

    def expect(self, number: int, request: VerifyRequest) -> None:
        pass

    def tell(self, session: int) -> None:
        if self._stage is not None:
            self._stage.tell(session)

    def idle(self) -> bool:
        return self._stage is None or not self._stage.progress[2]

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:  # it may be loading, which is not worth waiting for
            threading.Thread(target=stage.close, daemon=True).start()


class StageRecord:
    """The record of one stage, as far as it has reported: its spans, and its clock's offset to this process's."""

    def __init__(self, seat: StageHost, work: StageSpec) -> None:
        """Start the lane's clock: the stage is requested now."""
        self.seat, self.work = seat, work
        self.clock = StageClock()
        self.loaded = 0
        self.spans: list[TraceSpan] = []

    def has_loaded(self, layers: int) -> bool:
        """Take in that the stage has loaded `layers` layers; return whether that is news."""
        news, self.loaded = layers > self.loaded, max(layers, self.loaded)
        return news

    @property
    def whole(self) -> bool:
        """Whether the stage says that all its layers are loaded."""
        return self.loaded >= len(self.work.layers)


class Pipeline:
    """Stages that hold a whole model in order. Any number of threads may call `ask`, one at a time per session."""

    def __init__(self, stages: Sequence[tuple[StageHost, StageSpec]], *, direct: bool = True) -> None:
        """Have all stages begin to load. Stages pass rows to each other if `direct`, or else through this process."""
        self.lanes = [StageRecord(seat, replace(work, stages=len(stages))) for seat, work in stages]
        self.gone: tuple[str, StageLost] | None = None
        self.silent = False  # no answer came, and the device at fault is not known
        self._direct = direct
        self._way, self._deadline = OnTheWay(len(self.lanes)), Deadline()
        self._numbers = count(1)
        self._asked: dict[int, tuple[int, Future[StageAnswer]]] = {}  # by the last parcel's number: the first one's
        self._told: dict[int, tuple[set[int], threading.Event, float]] = {}
        self._lock = threading.Lock()
        for at, lane in reversed(list(enumerate(self.lanes))):  # a stage is there before the one that sends to it
            after = self.lanes[at + 1].seat if direct and at + 1 < len(self.lanes) else None
            lane.seat.begin(lane.work, partial(self._happened, at), after, self._waiting)

    def ask(
        self, session: int, start: int, ids: Ids, request: VerifyRequest, rows: int = MOST_ROWS
    ) -> Future[StageAnswer]:
        """Send `ids` for the positions from `start` on, in parcels of at most `rows`; return a future of the answer.

        The future fails with `DeviceLost` if a stage is gone, and with the engine's error if the engine refuses.
        """
        future: Future[StageAnswer] = Future()
        tail = len(request.draft) + 1
        with self._lock:
            ends = [*range(rows, len(ids) - tail + 1, rows), len(ids)]
            numbers, begin = [next(self._numbers) for _ in ends], 0
            parcels = []
            for end, number in zip(ends, numbers, strict=True):
                whole = request if end == len(ids) else None
                parcels.append(MicroBatch(session, number, start + begin, ids[begin:end], whole))
                self._way.sent(parcels[-1])
                begin = end
            if not self._asked:
                self._deadline.moved()
            self._asked[numbers[-1]] = numbers[0], future
            gone = self.gone
        if gone is not None:
            self._fail(self._lost(*gone))
            return future
        self.lanes[-1].seat.expect(numbers[-1], request)
        for parcel in parcels:
            self.lanes[0].seat.put(parcel)
        return future

    def measured(self, session: int, seconds: float = 2.0) -> list[StageRecord]:
        """Return the lanes with the spans of every stage since the last call; none for a stage that does not answer
        within `seconds`."""
        missing, there = set(range(len(self.lanes))), threading.Event()
        with self._lock:
            self._told[session] = missing, there, perf_counter()
        for lane in self.lanes:
            lane.spans = []
            lane.seat.tell(session)
        if self.gone is None:
            there.wait(seconds)
        with self._lock:
            self._told.pop(session, None)
        return self.lanes

    def close(self) -> None:
        """Release the stages; pending requests fail."""
        for lane in self.lanes:
            lane.seat.close()
        self._fail(DeviceLost("The pipeline is closed.", "Ask again."))

    def _happened(self, at: int, event: Event) -> None:
        lane = self.lanes[at]
        if isinstance(event, Forward):
            self._onward(at, event.parcel)
        elif isinstance(event, StageAnswer):
            lane.clock.heard(event.at)
            self._settle(event)
        elif isinstance(event, Loaded):
            lane.clock.heard(event.at)
            if lane.has_loaded(event.layers):
                self._deadline.moved()
        elif isinstance(event, StageTrace):
            with self._lock:
                missing, there, sent = self._told.get(event.session, (set[int](), threading.Event(), 0.0))
                if at in missing:  # else these times were not asked for
                    lane.clock.heard(event.at, sent)
                    lane.spans.extend(event.spans)
                    missing.discard(at)
                    if not missing:
                        there.set()
        elif isinstance(event, Failed):
            self._failed(event)
        else:
            self._end(lane.seat.name, event)

    def _end(self, name: str, gone: StageLost) -> None:
        """Record that the pipeline has lost a stage, if it is the first one lost, and fail all pending requests."""
        if self.gone is None:
            self.gone = name, gone
            self._fail(self._lost(*self.gone))

    def _onward(self, at: int, said: MicroBatch) -> None:
        """Give rows to the next stage, if they belong to a parcel that was sent."""
        try:
            with self._lock:
                parcel = self._way.passed(at, said)
        except ProtocolError as error:
            self._end(self.lanes[at].seat.name, StageLost(error))
            return
        if parcel is not None:
            self.lanes[at + 1].seat.put(parcel)

    def _waiting(self) -> bool:
        """Return whether an answer is waited for, and end the pipeline if it is overdue. Seats call this regularly."""
        with self._lock:
            if not self._asked:
                return False
            last, (first, _) = next(iter(self._asked.items()))
            numbers = range(first, last + 1)
            at = self._way.slowest(numbers)
        loaded = all(lane.whole for lane in self.lanes)
        idle = all(lane.seat.idle() for lane in self.lanes)
        if self._deadline.passed(len(numbers), loaded, idle):
            if not loaded:
                at = next(at for at, lane in enumerate(self.lanes) if not lane.whole)
            blamed = not self._direct or not loaded or len(self.lanes) == 1
            self.silent = not blamed
            name = self.lanes[at].seat.name if blamed else "one of the devices"
            error = DeviceLost("no answer has come in time, whatever it says that it does.", "Is it overloaded?")
            self._end(name, StageLost(error, blamed))
        return True

    def _settle(self, answer: StageAnswer) -> None:
        with self._lock:
            asked = self._asked.pop(answer.number, None)
            if asked is not None:
                self._way.over(range(asked[0], answer.number + 1))
                self._deadline.moved()
        if asked is not None:
            asked[1].set_result(answer)

    def _failed(self, event: Failed) -> None:
        """Fail the request that a lost parcel belongs to."""
        with self._lock:
            of = next((last for last, (first, _) in self._asked.items() if first <= event.number <= last), 0)
            asked = self._asked.pop(of, None)
            if asked is not None:
                self._way.over(range(asked[0], of + 1))
                self._deadline.moved()
        if asked is not None:
            asked[1].set_exception(event.error)

    def _fail(self, error: EdgeError) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for _, future in asked:
            future.set_exception(error)

    def _lost(self, name: str, gone: StageLost) -> DeviceLost:
        return DeviceLost(f"{name} is gone: {gone.error.what}", "The others go on if they hold its layers.")

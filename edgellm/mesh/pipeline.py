"""The pipeline of stages, as the coordinator drives it: their hosts, clocks and deadlines."""

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
from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, ProtocolError
from edgellm.mesh.messages import (
    MAX_ROWS,
    AnswerDue,
    Event,
    Failed,
    Loaded,
    MicroBatch,
    Order,
    StageAnswer,
    StageLost,
    StageSpec,
    StageTrace,
    TraceSpan,
    TraceWanted,
)
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import NO_IDS

IDLE_SECONDS = 60.0  # deadline of a request while every device says that it has nothing to do
ANSWER_SECONDS = 300.0  # deadline for each micro-batch of a request, once all layers are loaded
LOAD_SECONDS = 1800.0  # deadline for the next piece
PAUSE_SECONDS = 5.0  # gap between two checks, mostly a fraction of a second, that shows a pause of this process
_TRACE_SECONDS = 2.0  # limit for the stages' traces


class PendingBatches:
    """The micro-batches sent through `stages` stages that are not answered yet. Not thread-safe."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._known: dict[int, tuple[int, MicroBatch]] = {}  # furthest known stage, by number
        self._highest = 0

    def add(self, batch: MicroBatch) -> None:
        """Remember a micro-batch that is given to the first stage."""
        self._known[batch.number] = 0, batch
        self._highest = max(self._highest, batch.number)

    def forwarded(self, at: int, reported: MicroBatch) -> MicroBatch | None:
        """Return the micro-batch for the next stage, when stage `at` reports its rows: as it was sent, with these rows.
        Return None if it is no longer pending. Raises ProtocolError: no such micro-batch was sent there, it was
        reported before, or its rows have a wrong shape or values that are not finite."""
        if reported.number > self._highest or at >= self._last:
            raise ProtocolError(f"Micro-batch {reported.number} was not sent to that stage.", SAME_VERSION)
        if reported.number not in self._known:
            return None
        before, batch = self._known[reported.number]
        if at < before:
            raise ProtocolError(f"Micro-batch {reported.number} was forwarded twice.", SAME_VERSION)
        if reported.data.ndim != 2 or len(reported.data) != len(batch.data) or not np.isfinite(reported.data).all():
            raise ProtocolError(
                f"A stage sent {len(reported.data)} rows for {len(batch.data)} positions, or NaN or infinity.",
                "The model's file on that device may be damaged: pull it again, or deploy its layers again.",
            )
        self._known[reported.number] = at + 1, batch
        return replace(batch, data=reported.data)

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove these micro-batches: they are no longer pending."""
        for number in numbers:
            self._known.pop(number, None)

    def slowest(self, numbers: Sequence[int]) -> int:
        """Return the first stage that has not forwarded one of these micro-batches, as far as this process can see."""
        return min((self._known[number][0] for number in numbers if number in self._known), default=self._last)


class Deadline:
    """A deadline for the oldest open request, which reports of devices cannot put off."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._moved = self._busy = self._looked = clock()

    def restart(self) -> None:
        """Restart the time: a first request was sent, a request was settled, or a device has loaded layers."""
        self._moved = self._busy = self._looked = self._clock()

    def passed(self, batches: int, loaded: bool, idle: bool) -> bool:
        """Return whether a request of this many micro-batches is overdue. `loaded`: all layers are loaded. `idle`: all
        devices report that they have nothing to do."""
        now = self._clock()
        if (paused := now - self._looked) > PAUSE_SECONDS:  # this process itself was paused
            self._moved, self._busy = self._moved + paused, self._busy + paused
        self._looked = now
        if not (loaded and idle):
            self._busy = now
        longest = ANSWER_SECONDS * batches if loaded else LOAD_SECONDS
        return now - self._moved > longest or now - self._busy > IDLE_SECONDS


Post = Callable[[Event], None]


class StageHost(Protocol):
    """The host of a stage: this process, or a device across a link. None of its methods waits."""

    @property
    def name(self) -> str: ...

    def begin(self, work: StageSpec, post: Post, after: "StageHost | None", waiting: Callable[[], bool]) -> None:
        """Start the stage. `post` is called with every event, from any thread. Rows for the next host, `after`, may be
        sent to it directly; else they are posted. `waiting` returns whether an answer is due."""

    def send(self, order: Order) -> None: ...

    def idle(self) -> bool:
        """Return whether the stage reports that it has nothing to do."""

    def close(self) -> None:
        """Release the stage, which is not needed any more."""


class LocalStageHost:
    """A stage in this process."""

    def __init__(self, name: str, cache: WeightCache) -> None:
        self.name, self._cache = name, cache
        self._stage: Stage | None = None
        self._post: Post | None = None

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:  # noqa: ARG002
        self._post = post
        try:
            self._stage = Stage(work, self._cache, post)
            self._stage.start()
        except EdgeError as error:
            post(StageLost(error))

    def send(self, order: Order) -> None:
        try:
            if self._stage is not None:
                self._stage.take(order)
        except EdgeError as error:
            if self._post is not None and isinstance(order, MicroBatch):
                self._post(Failed(order.number, error))

    def idle(self) -> bool:
        return self._stage is None or not self._stage.progress[2]

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:  # a load under way is not worth waiting for
            threading.Thread(target=stage.close, daemon=True).start()


class StageRecord:
    """The reports of one stage: loaded layers, spans, and when its clock began, on this process's `perf_counter`."""

    def __init__(self, host: StageHost, work: StageSpec) -> None:
        """Begin: the stage is requested now."""
        self.host, self.work = host, work
        self.loaded = 0
        self.spans: list[TraceSpan] = []
        self._requested = self._asked = perf_counter()
        self.began = self._requested
        self._traced = threading.Event()  # set unless a trace is waited for
        self._traced.set()

    def ask_trace(self) -> None:
        """Ask for the spans since the last call."""
        self.spans.clear()
        self._traced.clear()
        self._asked = perf_counter()
        self.host.send(TraceWanted())

    def wait_for_trace(self, seconds: float) -> None:
        """Wait for the trace that was asked for; one that comes later is dropped."""
        self._traced.wait(seconds)
        self._traced.set()

    def keep_trace(self, trace: StageTrace) -> None:
        """Keep a stage's spans, if they were asked for."""
        if not self._traced.is_set():
            self.observe(trace.at, self._asked)
            self.spans.extend(trace.spans)
            self._traced.set()

    def observe(self, at: float, sent: float | None = None) -> None:
        """Record a message, written `at` seconds on the stage's clock, which has just arrived. Written after the
        question that was `sent`, if any, it is taken to come from the middle of that time."""
        now = perf_counter()
        written = now if sent is None else (sent + now) / 2
        self.began = min(max(self._requested, written - at), now)

    def has_loaded(self, layers: int) -> bool:
        """Record that the stage has loaded `layers` layers; return whether it has loaded more since the last call."""
        more, self.loaded = layers > self.loaded, max(layers, self.loaded)
        return more

    @property
    def whole(self) -> bool:
        """Return whether the stage reports that all its layers are loaded."""
        return self.loaded >= len(self.work.layers)


class Pipeline:
    """Stages that hold a whole model in order. Any number of threads may call `ask`, one at a time per session."""

    def __init__(self, stages: Sequence[tuple[StageHost, StageSpec]], *, direct: bool = True) -> None:
        """Start all stages. They send rows to each other if `direct`, else through this process."""
        self.records = [StageRecord(host, replace(work, stages=len(stages))) for host, work in stages]
        self.lost: tuple[str, StageLost] | None = None
        self.silent = False  # no answer came, and the device at fault is not known
        self._direct = direct
        self._pending, self._deadline = PendingBatches(len(self.records)), Deadline()
        self._numbers = count(1)
        # The number of a request's first micro-batch, and the future, by the number of its last micro-batch.
        self._asked: dict[int, tuple[int, Future[StageAnswer]]] = {}
        self._held: dict[int, Ids] = {}
        self._lock = threading.Lock()
        self._retired = False
        for at, record in reversed(list(enumerate(self.records))):  # a stage begins before its predecessor sends
            after = self.records[at + 1].host if direct and at + 1 < len(self.records) else None
            record.host.begin(record.work, partial(self._on_event, at), after, self._waiting)

    def ask(
        self, session: int, start: int, ids: Ids, request: VerifyRequest, rows: int = MAX_ROWS
    ) -> Future[StageAnswer]:
        """Send `ids` for the positions from `start` on, in micro-batches of `rows`; return a future of the answer.

        The future fails with `DeviceLost` if a stage is lost, and with the engine's error if the engine refuses.
        """
        future: Future[StageAnswer] = Future()
        tail = len(request.draft) + 1
        with self._lock:
            ends = [*range(rows, len(ids) - tail + 1, rows), len(ids)]
            numbers, begin = [next(self._numbers) for _ in ends], 0
            batches = []
            for end, number in zip(ends, numbers, strict=True):
                whole = request if end == len(ids) else None
                batches.append(MicroBatch(session, number, start + begin, ids[begin:end], whole))
                self._pending.add(batches[-1])
                begin = end
            if not self._asked:
                self._deadline.restart()
            self._asked[numbers[-1]] = numbers[0], future
            self._held[session] = np.concatenate((self.held(session)[:start], ids)).astype(np.int32)
            lost = self.lost
        if lost is not None:
            self._fail(*lost)
            return future
        self.records[-1].host.send(AnswerDue(numbers[-1], request))
        for batch in batches:
            self.records[0].host.send(batch)
        return future

    def held(self, session: int) -> Ids:
        """Return the tokens that the stages' caches hold for a session once all micro-batches are computed."""
        return self._held.get(session, NO_IDS)

    def forget(self, session: int) -> None:
        """Take the stages' caches to hold nothing for a session: an error has left them unknown."""
        self._held.pop(session, None)

    def measured(self) -> list[StageRecord]:
        """Return the records, each with the stage's spans since the last call; a stage that does not answer in time has
        none."""
        for record in self.records:
            record.ask_trace()
        until = perf_counter() + (_TRACE_SECONDS if self.lost is None else 0.0)
        for record in self.records:
            record.wait_for_trace(max(0.0, until - perf_counter()))
        return self.records

    def close(self) -> None:
        """Release the stages; pending requests fail."""
        for record in self.records:
            record.host.close()
        self._fail_all(DeviceLost("The pipeline is closed.", "Ask again."))

    def retire(self) -> None:
        """Release the stages as soon as no request is open. Nothing may be asked any more."""
        self._retired = True
        if not self._asked:
            self.close()

    def _on_event(self, at: int, event: Event) -> None:
        record = self.records[at]
        match event:
            case MicroBatch():
                self._forward(at, event)
            case StageAnswer():
                if (future := self._taken(event.number, event.number)) is not None:
                    future.set_result(event)
            case Failed():
                if (future := self._taken(event.number)) is not None:
                    future.set_exception(event.error)
            case Loaded():
                if record.has_loaded(event.layers):
                    record.observe(event.at)
                    self._deadline.restart()
            case StageTrace():
                record.keep_trace(event)
            case StageLost():
                self._record_loss(record.host.name, event)
        if self._retired and not self._asked:
            self.close()

    def _record_loss(self, name: str, lost: StageLost) -> None:
        """Record that the pipeline has lost a stage, if it is the first loss, and fail all pending requests."""
        if self.lost is None:
            self.lost = name, lost
            self._fail(name, lost)

    def _forward(self, at: int, reported: MicroBatch) -> None:
        """Send rows to the next stage, if they belong to a micro-batch that was sent."""
        try:
            with self._lock:
                batch = self._pending.forwarded(at, reported)
        except ProtocolError as error:
            self._record_loss(self.records[at].host.name, StageLost(error))
            return
        if batch is not None:
            self.records[at + 1].host.send(batch)

    def _waiting(self) -> bool:
        """Return whether an answer is due, and end the pipeline if it is overdue. Hosts call this regularly."""
        with self._lock:
            if not self._asked:
                return False
            last, (first, _) = next(iter(self._asked.items()))
            numbers = range(first, last + 1)
            at = self._pending.slowest(numbers)
        loaded = all(record.whole for record in self.records)
        idle = all(record.host.idle() for record in self.records)
        if self._deadline.passed(len(numbers), loaded, idle):
            if not loaded:
                at = next(at for at, record in enumerate(self.records) if not record.whole)
            blamed = not self._direct or not loaded or len(self.records) == 1
            self.silent = not blamed
            name = self.records[at].host.name if blamed else "one of the devices"
            error = DeviceLost(
                "it has not answered in time, although it reports progress.", "Check whether it is overloaded."
            )
            self._record_loss(name, StageLost(error, blamed))
        return True

    def _taken(self, number: int, last: int | None = None) -> Future[StageAnswer] | None:
        """Return the future of the request that the micro-batch belongs to, as its `last` one if that is given; the
        request is settled."""
        with self._lock:
            of = last or next((end for end, (first, _) in self._asked.items() if first <= number <= end), 0)
            if (asked := self._asked.pop(of, None)) is None:
                return None
            self._pending.forget(range(asked[0], of + 1))
            self._deadline.restart()
        return asked[1]

    def _fail(self, name: str, lost: StageLost) -> None:
        self._fail_all(
            DeviceLost(f"{name} was lost: {lost.error.what}", "The other devices continue if they hold its layers.")
        )

    def _fail_all(self, error: EdgeError) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for _, future in asked:
            future.set_exception(error)

"""The pipeline of stages, as the coordinator drives it: their hosts, clocks and deadlines."""

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
from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, ProtocolError
from edgellm.mesh.messages import (
    MAX_ROWS,
    AnswerDue,
    CacheTaken,
    CacheWanted,
    Event,
    Failed,
    Forward,
    LayerCache,
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
from edgellm.spec.verifier import VerifyRequest

_DRIFT = 1e-4  # seconds per second by which two clocks may drift apart: five times a crystal's data-sheet value


class StageClock:
    """The moment at which a stage's clock stood at 0, within the bounds that its messages set.

    A message that says `at` and arrives now was written earlier, so the clock began before now - `at`; an answer to a
    message sent at `sent` was written later than `sent`. Each message narrows the two bounds, and drift widens them.
    """

    def __init__(self) -> None:
        """Record the time: the stage is requested now, so its clock begins later."""
        self._asked = perf_counter()
        self._latest: tuple[float, float] | None = None  # the bound, and when it was found
        self._earliest: tuple[float, float] | None = None

    def observe(self, at: float, sent: float | None = None) -> None:
        """Record a message that was written `at` seconds on the stage's clock, and has just arrived. `sent` is when the
        message that it answers was sent, if that is known."""
        now, at = perf_counter(), max(0.0, at)
        if self._latest is None or now - at < self._latest[0] + _DRIFT * (now - self._latest[1]):
            self._latest = now - at, now
        if sent is not None and (
            self._earliest is None or sent - at > self._earliest[0] - _DRIFT * (now - self._earliest[1])
        ):
            self._earliest = sent - at, now

    @property
    def began(self) -> float:
        """The middle between both bounds, or the later bound before the first answer; never before the request."""
        if self._latest is None:
            return self._asked
        latest = self._latest[0]
        earliest = latest if self._earliest is None else min(self._earliest[0], latest)
        return max(self._asked, (earliest + latest) / 2)


IDLE_SECONDS = 60.0  # deadline of a request while every device says that it has nothing to do
ANSWER_SECONDS = 300.0  # deadline for each micro-batch of a request, once all layers are loaded
LOAD_SECONDS = 1800.0  # deadline for the next piece
PAUSE_SECONDS = 5.0  # gap between two checks, mostly a fraction of a second, that shows a pause of this process


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
        Return None if it is no longer pending.

        Raises:
            ProtocolError: no such micro-batch was sent there, it was reported before, or its rows have a wrong shape or
                values that are not finite.
        """
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

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:
        """Start the stage. `post` is called with every event, from any thread. Rows for the next host, `after`, may be
        sent to it directly; else they are posted as `Forward`. `waiting` returns whether an answer is due."""

    def send(self, order: Order) -> None:
        """Give the stage an order."""

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
        if (stage := self._stage) is None:
            return
        if isinstance(order, CacheWanted | LayerCache):  # these orders may wait for a pass
            threading.Thread(target=self._give, args=(stage, order), name="stage-cache", daemon=True).start()
        else:
            self._give(stage, order)

    def _give(self, stage: Stage, order: Order) -> None:
        """Give the stage an order; an error ends the stage, unless it is of a single micro-batch."""
        try:
            stage.take(order)
        except EdgeError as error:
            if self._post is not None:
                batch = order if isinstance(order, MicroBatch) else None
                self._post(StageLost(error) if batch is None else Failed(batch.session, batch.number, error))

    def idle(self) -> bool:
        return self._stage is None or not self._stage.progress[2]

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:  # a load under way is not worth waiting for
            threading.Thread(target=stage.close, daemon=True).start()


class StageRecord:
    """The reports of one stage: loaded layers, spans, and its clock."""

    def __init__(self, host: StageHost, work: StageSpec) -> None:
        """Start the record's clock: the stage is requested now."""
        self.host, self.work = host, work
        self.clock = StageClock()
        self.loaded = 0
        self.spans: list[TraceSpan] = []

    def request_spans(self, session: int) -> None:
        """Ask the stage for its spans; they replace the known spans."""
        self.spans = []
        self.host.send(TraceWanted(session))

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
        self._traces: dict[int, tuple[set[int], threading.Event, float]] = {}
        self._lock = threading.Lock()
        self._retired = False
        # Callbacks by session: for keys and values that a stage gives, and for a stage's report that it has taken some.
        self._given: dict[int, Callable[[LayerCache], None]] = {}
        self._taken: dict[int, Callable[[CacheTaken], None]] = {}
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
            lost = self.lost
        if lost is not None:
            self._fail(self._device_lost(*lost))
            return future
        self.records[-1].host.send(AnswerDue(numbers[-1], request))
        for batch in batches:
            self.records[0].host.send(batch)
        return future

    def measured(self, session: int, seconds: float = 2.0) -> list[StageRecord]:
        """Return the records, each with the stage's spans since the last call. A stage that does not answer within
        `seconds` has none."""
        missing, there = set(range(len(self.records))), threading.Event()
        with self._lock:
            self._traces[session] = missing, there, perf_counter()
        for record in self.records:
            record.request_spans(session)
        if self.lost is None:
            there.wait(seconds)
        with self._lock:
            self._traces.pop(session, None)
        return self.records

    def close(self) -> None:
        """Release the stages; pending requests fail."""
        for record in self.records:
            record.host.close()
        self._fail(DeviceLost("The pipeline is closed.", "Ask again."))

    def give_caches(self, session: int, positions: int, given: Callable[[LayerCache], None]) -> None:
        """Ask all stages for their keys and values for a session's first positions; `given` is called with each."""
        self._given[session] = given
        for record in self.records:
            record.host.send(CacheWanted(session, positions))

    def expect_caches(self, session: int, taken: Callable[[CacheTaken], None]) -> None:
        """Have `taken` called when a stage has taken the keys and values of its layers for a session, or cannot."""
        self._taken[session] = taken

    def take_cache(self, cache: LayerCache) -> None:
        """Give the keys and values of a layer to the stage that has it."""
        for record in self.records:
            if cache.layer in record.work.layers:
                record.host.send(cache)

    def retire(self) -> None:
        """Release the stages as soon as no request is open. Nothing may be asked any more."""
        with self._lock:
            self._retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        with self._lock:
            over = self._retired and not self._asked
        if over:
            self.close()

    def _on_event(self, at: int, event: Event) -> None:
        record = self.records[at]
        if isinstance(event, Forward):
            self._forward(at, event.batch)
        elif isinstance(event, StageAnswer):
            record.clock.observe(event.at)
            self._settle(event)
        elif isinstance(event, Loaded):
            record.clock.observe(event.at)
            if record.has_loaded(event.layers):
                self._deadline.restart()
        elif isinstance(event, StageTrace):
            with self._lock:
                missing, there, sent = self._traces.get(event.session, (set[int](), threading.Event(), 0.0))
                if at in missing:  # otherwise nobody asked for these times
                    record.clock.observe(event.at, sent)
                    record.spans.extend(event.spans)
                    missing.discard(at)
                    if not missing:
                        there.set()
        elif isinstance(event, Failed):
            self._failed(event)
        elif isinstance(event, LayerCache):
            self._given.get(event.session, _ignore)(event)
        elif isinstance(event, CacheTaken):
            self._taken.get(event.session, _ignore)(event)
        else:
            self._record_loss(record.host.name, event)

    def _record_loss(self, name: str, lost: StageLost) -> None:
        """Record that the pipeline has lost a stage, if it is the first loss, and fail all pending requests."""
        if self.lost is None:
            self.lost = name, lost
            self._fail(self._device_lost(*self.lost))
            self._close_if_retired()

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

    def _settle(self, answer: StageAnswer) -> None:
        with self._lock:
            asked = self._asked.pop(answer.number, None)
            if asked is not None:
                self._pending.forget(range(asked[0], answer.number + 1))
                self._deadline.restart()
        if asked is not None:
            asked[1].set_result(answer)
        self._close_if_retired()

    def _failed(self, event: Failed) -> None:
        """Fail the request that a failed micro-batch belongs to."""
        with self._lock:
            of = next((last for last, (first, _) in self._asked.items() if first <= event.number <= last), 0)
            asked = self._asked.pop(of, None)
            if asked is not None:
                self._pending.forget(range(asked[0], of + 1))
                self._deadline.restart()
        if asked is not None:
            asked[1].set_exception(event.error)
        self._close_if_retired()

    def _fail(self, error: EdgeError) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for _, future in asked:
            future.set_exception(error)

    def _device_lost(self, name: str, lost: StageLost) -> DeviceLost:
        return DeviceLost(f"{name} was lost: {lost.error.what}", "The other devices continue if they hold its layers.")


def _ignore(_event: Event) -> None:
    """Do nothing: nobody waits for this event any more."""

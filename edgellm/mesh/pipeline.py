"""The stages in a row, as the coordinator sees them: parcels in at the front, verdicts out at the back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Protocol

from edgellm.engine import Ids
from edgellm.errors import DeviceLost, EdgeError
from edgellm.mesh.records import MOST_ROWS, Answer, Ask, Event, Failed, Gone, Loaded, Onward, Parcel, Span, Times, Work
from edgellm.mesh.shelf import Shelf
from edgellm.mesh.stage import Stage

Post = Callable[[Event], None]


class Seat(Protocol):
    """A place at which a stage can be: this process, or a device across a link. None of its methods waits."""

    @property
    def name(self) -> str: ...

    def begin(self, work: Work, post: Post, after: Seat | None, waiting: Callable[[], bool]) -> None:
        """Begins to load. `post` hears of everything, from any thread; rows for the seat `after` this one may be given
        to it directly, and else are posted as `Onward`. `waiting` tells whether somebody waits for the pipeline."""
        ...

    def put(self, parcel: Parcel) -> None: ...

    def expect(self, number: int, ask: Ask) -> None:
        """Whoever gives it the parcel with this number, its answer is to this question."""
        ...

    def tell(self, session: int) -> None:
        """Has `Times` posted."""
        ...

    def close(self) -> None:
        """The stage is not needed any more."""
        ...


class LocalSeat:
    """A stage in this process."""

    def __init__(self, name: str, shelf: Shelf, threads: int | None = None) -> None:
        self.name, self._shelf, self._threads = name, shelf, threads
        self._stage: Stage | None = None
        self._post: Post | None = None

    def begin(self, work: Work, post: Post, after: Seat | None, waiting: Callable[[], bool]) -> None:  # noqa: ARG002
        self._post = post
        try:
            self._stage = Stage(work, self._shelf, post, threads=self._threads)
            self._stage.start()
        except EdgeError as error:
            post(Gone(error))

    def put(self, parcel: Parcel) -> None:
        try:
            if self._stage is not None:
                self._stage.put(parcel)
        except EdgeError as error:
            if self._post is not None:
                self._post(Failed(parcel.session, parcel.number, error))

    def expect(self, number: int, ask: Ask) -> None:
        pass

    def tell(self, session: int) -> None:
        if self._stage is not None:
            self._stage.tell(session)

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:  # it may be loading, and nobody waits for that
            threading.Thread(target=stage.close, daemon=True).start()


class Lane:
    """What one stage did, as far as it has told: on this process's clock, in seconds."""

    def __init__(self, seat: Seat, work: Work) -> None:
        self.seat, self.work = seat, work
        self.began = perf_counter()
        self.loaded = 0
        self.spans: list[Span] = []


class Pipeline:
    """Stages that hold a whole model in order. Any number of threads may ask, one at a time for each session."""

    def __init__(self, stages: Sequence[tuple[Seat, Work]]) -> None:
        """All stages begin to load at once."""
        self.lanes = [Lane(seat, replace(work, stages=len(stages))) for seat, work in stages]
        self.gone: tuple[str, Gone] | None = None
        self._numbers = count(1)
        self._asked: dict[int, tuple[int, Future[Answer]]] = {}  # by the last parcel's number: the first one's
        self._told: dict[int, tuple[set[int], threading.Event]] = {}
        self._lock = threading.Lock()
        for at, lane in reversed(list(enumerate(self.lanes))):  # who is waited for longest is there first
            after = self.lanes[at + 1].seat if at + 1 < len(self.lanes) else None
            lane.began = perf_counter()
            lane.seat.begin(lane.work, partial(self._happened, at), after, lambda: bool(self._asked))

    def ask(self, session: int, start: int, ids: Ids, ask: Ask, rows: int = MOST_ROWS) -> Future[Answer]:
        """Sends `ids` for the positions from `start` on, in parcels of at most `rows`; the verdict is on its way.

        It fails with `DeviceLost` where a stage is gone, and with what the engine says where it refuses.
        """
        future: Future[Answer] = Future()
        tail = len(ask.chunk) + 1
        with self._lock:
            ends = [*range(rows, len(ids) - tail + 1, rows), len(ids)]
            numbers = [next(self._numbers) for _ in ends]
            self._asked[numbers[-1]] = numbers[0], future
            gone, begin = self.gone, 0
        if gone is not None:
            self._fail(self._lost(*gone))
            return future
        self.lanes[-1].seat.expect(numbers[-1], ask)
        for end, number in zip(ends, numbers, strict=True):
            whole = ask if end == len(ids) else None
            self.lanes[0].seat.put(Parcel(session, number, start + begin, ids[begin:end], whole))
            begin = end
        return future

    def measured(self, session: int, seconds: float = 2.0) -> list[Lane]:
        """The lanes, with what every stage did since it was asked last; of one that does not answer nothing new."""
        missing, there = set(range(len(self.lanes))), threading.Event()
        with self._lock:
            self._told[session] = missing, there
        for lane in self.lanes:
            lane.spans = []
            lane.seat.tell(session)
        if self.gone is None:
            there.wait(seconds)
        with self._lock:
            self._told.pop(session, None)
        return self.lanes

    def close(self) -> None:
        """Lets the stages go; what is on its way fails."""
        for lane in self.lanes:
            lane.seat.close()
        self._fail(DeviceLost("The pipeline is closed.", "Ask again."))

    def _happened(self, at: int, event: Event) -> None:
        lane = self.lanes[at]
        if isinstance(event, Onward):
            self.lanes[at + 1].seat.put(event.parcel)
        elif isinstance(event, Answer):
            self._settle(event)
        elif isinstance(event, Loaded):
            lane.loaded = event.layers
        elif isinstance(event, Times):
            lane.spans.extend(event.spans)
            with self._lock:
                missing, there = self._told.get(event.session, (set(), threading.Event()))
                missing.discard(at)
                if not missing:
                    there.set()
        elif isinstance(event, Failed):
            self._failed(event)
        elif self.gone is None:
            self.gone = lane.seat.name, event
            self._fail(self._lost(*self.gone))

    def _settle(self, answer: Answer) -> None:
        with self._lock:
            asked = self._asked.pop(answer.number, None)
        if asked is not None:
            asked[1].set_result(answer)

    def _failed(self, event: Failed) -> None:
        """A parcel is lost, and with it the question that it belongs to."""
        with self._lock:
            of = (last for last, (first, _) in self._asked.items() if first <= event.number <= last)
            asked = self._asked.pop(next(of, 0), None)
        if asked is not None:
            asked[1].set_exception(event.error)

    def _fail(self, error: EdgeError) -> None:
        with self._lock:
            asked, self._asked = list(self._asked.values()), {}
        for _, future in asked:
            future.set_exception(error)

    def _lost(self, name: str, gone: Gone) -> DeviceLost:
        return DeviceLost(f"{name} is gone: {gone.error.what}", "The others go on if they hold its layers.")

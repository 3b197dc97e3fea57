"""The pipeline of stages, as the coordinator drives it: their hosts, clocks and deadlines."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from edgellm.engine import Ids
from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, ProtocolError
from edgellm.mesh.messages import MAX_ROWS, Event, Failed, MicroBatch, StageAnswer, StageLost, StageSpec, Took
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import NO_IDS

ANSWER_SECONDS = 600.0
"""The deadline for each micro-batch of the oldest open request, since a request was settled or layers were loaded:
other reports of devices cannot put it off."""
_DAMAGED = (
    f"{SAME_VERSION} If they do, the model's file there may be damaged: pull it again, or deploy its layers again."
)


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is not answered yet, and its micro-batches by number, each with the furthest stage that is known
    to have it, and the time when it was sent there."""

    batches: dict[int, tuple[int, MicroBatch, float]] = field(default_factory=dict)
    answer: Future[StageAnswer] = field(default_factory=Future)


Post = Callable[[Event], None]


class StageHost(Protocol):
    """The host of a stage: this process, or a device across a link. None of its methods waits."""

    @property
    def name(self) -> str: ...

    def begin(self, work: StageSpec, post: Post, pipeline: "Pipeline") -> None:
        """Start the stage of a `pipeline`. `post` is called with every event, from any thread."""

    def send(self, batch: MicroBatch) -> None: ...

    def close(self) -> None:
        """Release the stage, which is not needed any more."""


class LocalStageHost:
    """A stage in this process."""

    def __init__(self, name: str, cache: WeightCache) -> None:
        self.name, self._cache = name, cache
        self._stage: Stage | None = None
        self._post: Post | None = None

    def begin(self, work: StageSpec, post: Post, pipeline: "Pipeline") -> None:  # noqa: ARG002
        self._post = post
        try:
            self._stage = Stage(work, self._cache, post)
            self._stage.start()
        except EdgeError as error:
            post(StageLost(error))

    def send(self, batch: MicroBatch) -> None:
        try:
            if self._stage is not None:
                self._stage.put(batch)
        except EdgeError as error:
            if self._post is not None:
                self._post(Failed(batch.number, error))

    def close(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:  # a load under way is not worth waiting for
            threading.Thread(target=stage.close, daemon=True).start()


class Crossing(NamedTuple):
    """When a stage had received a request's last micro-batch, and had `finished` it, on this process's `perf_counter`,
    where the ways there and back take as long; and its seconds of `computing` for the request."""

    received: float
    finished: float
    computing: float


class StageRecord:
    """The reports of one stage: its loaded layers, when they were, and how the first request has crossed it."""

    def __init__(self, host: StageHost, work: StageSpec) -> None:
        self.host, self.work = host, work
        self.loaded, self.loaded_at = 0, 0.0
        self.crossing: Crossing | None = None

    def has_loaded(self, layers: int) -> bool:
        """Record that the stage has loaded `layers` layers; return whether it has loaded more since the last call."""
        if more := layers > self.loaded:
            self.loaded, self.loaded_at = layers, perf_counter()
        return more

    def passed(self, sent: float, took: Took) -> None:
        """Record that a request's last micro-batch, which was `sent` to the stage, comes out of it; the first time."""
        now = perf_counter()
        way = max(0.0, now - sent - took.held) / 2.0
        self.crossing = self.crossing or Crossing(sent + way, now - way, took.computing)

    def forget(self) -> None:
        """Record the next crossing."""
        self.crossing = None

    @property
    def whole(self) -> bool:
        """Return whether the stage reports that all its layers are loaded."""
        return self.loaded >= len(self.work.layers)


class Pipeline:
    """Stages that hold a whole model in order. Any number of threads may call `ask`, one at a time per session."""

    def __init__(self, stages: Sequence[tuple[StageHost, StageSpec]]) -> None:
        """Start all stages. Their rows pass through this process, which knows so where they are."""
        self.records = [StageRecord(host, work) for host, work in stages]
        self.lost: tuple[str, StageLost] | None = None
        self._open: dict[int, _Asked] = {}  # by the number of each micro-batch
        self._sent = 0  # micro-batches
        self._moved = perf_counter()
        self._held: dict[int, Ids] = {}
        self._lock = threading.Lock()
        self._retired = False
        for at, record in enumerate(self.records):
            record.host.begin(record.work, partial(self._on_event, at), self)

    def ask(
        self, session: int, start: int, ids: Ids, request: VerifyRequest, rows: int = MAX_ROWS
    ) -> Future[StageAnswer]:
        """Send `ids` for the positions from `start` on, in micro-batches of `rows`; return a future of the answer.

        The future fails with `DeviceLost` if a stage is lost, and with the engine's error if the engine refuses.
        """
        with self._lock:
            if not self._open:
                self._moved = perf_counter()
            asked, begin = _Asked(), 0
            for end in (*range(rows, len(ids) - len(request.draft), rows), len(ids)):
                self._sent += 1
                judged = request if end == len(ids) else None
                batch = MicroBatch(session, self._sent, start + begin, ids[begin:end], judged)
                asked.batches[self._sent] = 0, batch, perf_counter()
                self._open[self._sent], begin = asked, end
            self._held[session] = np.concatenate((self.held(session)[:start], ids)).astype(np.int32)
            batches, lost = list(asked.batches.values()), self.lost
        if lost is not None:
            self._fail(*lost)
            return asked.answer
        for _, batch, _ in batches:
            self.records[0].host.send(batch)
        return asked.answer

    def held(self, session: int) -> Ids:
        """Return the tokens that the stages' caches hold for a session once all micro-batches are computed."""
        return self._held.get(session, NO_IDS)

    def forget(self, session: int) -> None:
        """Take the stages' caches to hold nothing for a session: an error has left them unknown."""
        self._held.pop(session, None)

    @property
    def whole(self) -> bool:
        """Return whether all stages report that their layers are loaded."""
        return all(record.whole for record in self.records)

    def measure(self) -> None:
        """Have the records keep how the next request with a verdict crosses the stages."""
        for record in self.records:
            record.forget()

    def close(self) -> None:
        """Release the stages; pending requests fail."""
        for record in self.records:
            record.host.close()
        self._fail_all(DeviceLost("The pipeline is closed.", "Ask again."))

    def retire(self) -> None:
        """Release the stages as soon as no request is open. Nothing may be asked any more."""
        self._retired = True
        if not self._open:
            self.close()

    def _on_event(self, at: int, event: Event) -> None:
        record = self.records[at]
        match event:
            case MicroBatch():
                self._forward(at, event)
            case StageAnswer():
                if (asked := self._settled(event.number)) is not None:
                    record.passed(asked.batches[event.number][2], event.took)
                    asked.answer.set_result(event)
            case Failed():
                if (asked := self._settled(event.number)) is not None:
                    asked.answer.set_exception(event.error)
            case StageLoaded():
                if record.has_loaded(event.layers):
                    self._moved = perf_counter()
            case StageLost():
                self._record_loss(record.host.name, event)
        if self._retired and not self._open:
            self.close()

    def _record_loss(self, name: str, lost: StageLost) -> None:
        """Record that the pipeline has lost a stage, if it is the first loss, and fail all pending requests."""
        if self.lost is None:
            self.lost = name, lost
            self._fail(name, lost)

    def _forward(self, at: int, reported: MicroBatch) -> None:
        """Send the rows that a stage reports to the next stage, in a micro-batch that is pending. If no such
        micro-batch was sent there, if it was reported before, or has a wrong shape or values that are not finite, the
        stage is lost."""
        number, data, wrong = reported.number, reported.data, ""
        with self._lock:
            if number > self._sent or at + 1 == len(self.records):
                wrong = f"Micro-batch {number} was not sent to that stage."
            elif (asked := self._open.get(number)) is None:
                return
            else:
                before, batch, sent = asked.batches[number]
                if at < before:
                    wrong = f"Micro-batch {number} was forwarded twice."
                elif data.ndim != 2 or len(data) != len(batch.data) or not np.isfinite(data).all():
                    wrong = f"A stage sent {len(data)} rows for {len(batch.data)} positions, or NaN or infinity."
                asked.batches[number] = at + 1, batch, perf_counter()
                if batch.request is not None:
                    self.records[at].passed(sent, reported.took)
        if wrong:
            self._record_loss(self.records[at].host.name, StageLost(ProtocolError(wrong, _DAMAGED)))
        else:
            self.records[at + 1].host.send(replace(batch, data=data))

    def owes(self, host: StageHost) -> bool:
        """Return whether a host's stage still has to load layers, or has a micro-batch."""
        at = next(at for at, record in enumerate(self.records) if record.host is host)
        with self._lock:
            asked = [batch for one in self._open.values() for batch in one.batches.values()]
        return not self.records[at].whole or any(place == at for place, *_ in asked)

    def judged(self, number: int) -> VerifyRequest | None:
        """Return the request that an answer to a micro-batch is for; None if it is no longer pending. Raises
        ProtocolError: there is no such request."""
        with self._lock:
            asked = self._open.get(number)
            request = None if asked is None else asked.batches[number][1].request
            if request is None and (asked is not None or number > self._sent):
                raise ProtocolError(f"Micro-batch {number} was answered, but not requested.", SAME_VERSION)
            return request

    def waiting(self) -> bool:
        """Return whether an answer is due, and end the pipeline if it is overdue. Hosts call this regularly."""
        with self._lock:
            if not self._open:
                return False
            batches = next(iter(self._open.values())).batches
            at = min(at for at, *_ in batches.values())  # the first stage that has not forwarded one
        if perf_counter() - self._moved > ANSWER_SECONDS * len(batches):
            at = next((at for at, record in enumerate(self.records) if not record.whole), at)
            error = DeviceLost(
                "it has not answered in time, although it reports progress.", "Check whether it is overloaded."
            )
            self._record_loss(self.records[at].host.name, StageLost(error))
        return True

    def _settled(self, number: int) -> _Asked | None:
        """Return the request that the micro-batch belongs to, which is settled now; None if it was before."""
        with self._lock:
            if (asked := self._open.get(number)) is not None:
                for one in asked.batches:
                    del self._open[one]
                self._moved = perf_counter()
        return asked

    def _fail(self, name: str, lost: StageLost) -> None:
        self._fail_all(
            DeviceLost(f"{name} was lost: {lost.error.what}", "The other devices continue if they hold its layers.")
        )

    def _fail_all(self, error: EdgeError) -> None:
        with self._lock:
            failed = list(dict.fromkeys(self._open.values()))
            self._open.clear()
        for asked in failed:
            asked.answer.set_exception(error)

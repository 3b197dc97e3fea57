"""The verifier's worker: one thread that owns the context and computes for all sessions together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol, TypeAlias

import numpy as np

from edgellm.engine import SeqRows
from edgellm.errors import EdgeError, EngineFailed
from edgellm.serve.scheduler import Batch, Kind, Limits, Want, next_batch
from edgellm.serve.sessions import SessionTable
from edgellm.serve.wire import Ask
from edgellm.spec.records import NO_IDS, Chunk, Floats, Ids, Sampling, Verdict
from edgellm.spec.verify import judge


@dataclass(frozen=True, slots=True)
class Missing:
    """The session holds only the first `position` tokens: the others have to be sent again."""

    position: int


Answer: TypeAlias = Verdict | Missing | EdgeError
Deliver: TypeAlias = Callable[[Answer], None]


class Engine(Protocol):
    """What the worker needs of a context with one stream of tokens per sequence (`edgellm.engine.Context`)."""

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]: ...

    def cached(self, seq: int = 0) -> Ids: ...

    def sync(self, ids: Ids, seq: int = 0) -> int: ...

    def rollback(self, length: int, seq: int = 0) -> None: ...

    def clear(self, seq: int = 0) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Counters:
    """What the worker has done so far. `shared` batches held several sessions, the `widest` that many."""

    batches: int = 0
    prefills: int = 0
    shared: int = 0
    widest: int = 0
    rows: int = 0
    verdicts: int = 0
    verified: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """What a session asks for: a verdict on `chunk` after `ids`, which are all tokens before it."""

    session: int
    sampling: Sampling
    ids: Ids
    chunk: Chunk
    extra: int
    deliver: Deliver


@dataclass(slots=True)
class _Job:
    """A request that has a slot. The slot's cache holds the first `done` of `ids`; `chunk` comes behind them."""

    request: _Request
    slot: int
    ids: Ids
    chunk: Chunk
    done: int
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0


class Batcher:
    """Takes requests from any thread, answers them from its own."""

    def __init__(
        self, context: Engine, slots: int, is_eog: Callable[[int], bool], limits: Limits | None = None
    ) -> None:
        """`context` has `slots` sequences; it is used by the worker alone and closed with it."""
        self._context = context
        self._is_eog = is_eog
        self._limits = limits or Limits()
        self._table = SessionTable(slots, context.cached)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queue: dict[int, _Request] = {}  # requests without a slot, and requests with one: by session, which
        self._jobs: dict[int, _Job] = {}  #      has one at a time; oldest first
        self._after: Kind | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)
        self.counters = Counters()

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet, about."""
        return len(self._queue) + len(self._jobs) + self._inbox.qsize()

    def submit(self, session: int, sampling: Sampling, ask: Ask, deliver: Deliver) -> None:
        """Asks for a verdict; `deliver` is called from the worker's thread, unless the session leaves before.

        Where the worker has ended it may be called twice, with the same error.
        """
        self._inbox.put(lambda: self._admit(session, sampling, ask, deliver))
        if self._over:  # perhaps nobody hears it any more
            deliver(_ended())

    def leave(self, session: int) -> None:
        """The session is over; a request of it that still waits is forgotten."""
        self._inbox.put(lambda: self._forget(session))

    def close(self) -> None:
        """Ends the thread after the batch that it is computing, and closes the context."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._context.close()

    def _run(self) -> None:
        try:
            while self._hear():
                for request in list(self._queue.values()):
                    self._claim(request)
                batch = next_batch(self._wants(), self._limits, self._after)
                if batch is not None:
                    self._compute(batch)
                    self._after = batch.kind
        finally:
            self._over = True
            for request in [*self._queue.values(), *(job.request for job in self._jobs.values())]:
                request.deliver(_ended())

    def _hear(self) -> bool:
        """Takes in what has arrived, waiting for it where there is nothing to do. False: it is time to go."""
        while not (self._jobs or self._queue) or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True

    def _admit(self, session: int, sampling: Sampling, ask: Ask, deliver: Deliver) -> None:
        slot = self._table.slot(session)
        held = self._context.cached(slot) if slot is not None else NO_IDS
        if ask.position > len(held):
            deliver(Missing(len(held)))
            return
        ids = np.concatenate((held[: ask.position], ask.prefix))
        request = _Request(session, sampling, ids, ask.chunk, ask.extra, deliver)
        self._queue[session] = request
        if slot is not None:
            self._claim(request)  # now, lest its slot goes to an older request while it waits

    def _claim(self, request: _Request) -> None:
        slot = self._table.claim(request.session, request.ids)
        if slot is not None:
            del self._queue[request.session]
            done = self._context.sync(request.ids, slot)
            self._jobs[request.session] = _Job(request, slot, request.ids, request.chunk, done)

    def _forget(self, session: int) -> None:
        self._queue.pop(session, None)
        self._jobs.pop(session, None)
        self._table.drop(session)

    def _wants(self) -> list[Want]:
        return [Want(session, len(job.ids) - job.done, len(job.chunk)) for session, job in self._jobs.items()]

    def _compute(self, batch: Batch) -> None:
        jobs = [self._jobs[share.session] for share in batch.shares]
        rows = []
        for job, share in zip(jobs, batch.shares, strict=True):
            rest = job.ids[job.done :]
            ids = np.concatenate((rest, job.chunk.ids)) if share.outputs else rest[: share.tokens]
            rows.append(SeqRows(job.slot, ids, share.outputs))
        began = perf_counter()
        try:
            logits = self._context.decode_rows(rows)
        except EdgeError as error:
            for job in jobs:
                self._fail(job, error)
            return
        seconds = perf_counter() - began
        self._count(batch)
        for job, share, views in zip(jobs, batch.shares, logits, strict=True):
            job.seconds += seconds
            job.done += share.tokens
            if share.outputs:
                self._judge(job, views)

    def _judge(self, job: _Job, logits: Floats) -> None:
        """Applies the rule to a decoded chunk, then either answers or goes on with the verifier's own last token."""
        request = job.request
        try:
            accepted, token = judge(job.chunk, logits, request.sampling, position=len(job.ids))
        except EdgeError as error:
            self._fail(job, error)
            return
        job.passes += 1
        if not job.tokens:
            job.accepted = accepted
        job.tokens.append(token)
        job.done = len(job.ids) + accepted
        self._context.rollback(job.done, job.slot)
        if len(job.tokens) <= request.extra and not self._is_eog(token):
            job.ids = np.concatenate((job.ids, job.chunk.ids[:accepted], np.array([token], dtype=np.int32)))
            job.chunk = _NOTHING
            return
        self._answer(job, Verdict(job.accepted, np.array(job.tokens, np.int32), job.seconds, passes=job.passes))

    def _fail(self, job: _Job, error: EdgeError) -> None:
        self._context.clear(job.slot)
        self._answer(job, error)

    def _answer(self, job: _Job, answer: Answer) -> None:
        session = job.request.session
        del self._jobs[session]
        self._table.release(session)
        if isinstance(answer, Verdict):
            was = self.counters
            verified = was.verified + answer.accepted + len(answer.tokens)
            self.counters = replace(was, verdicts=was.verdicts + 1, verified=verified)
        job.request.deliver(answer)

    def _count(self, batch: Batch) -> None:
        was, sessions = self.counters, len(batch.shares)
        self.counters = replace(
            was,
            batches=was.batches + 1,
            prefills=was.prefills + (batch.kind is Kind.PREFILL),
            shared=was.shared + (sessions > 1),
            widest=max(was.widest, sessions),
            rows=was.rows + sum(share.tokens for share in batch.shares),
            evictions=self._table.evictions,
        )


def _ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")


_NOTHING = Chunk()

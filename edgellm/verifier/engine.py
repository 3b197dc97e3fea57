"""The verifier engine: computes the requests of all sessions over one context, a batch at a time, and judges their
drafts.

An engine belongs to one thread: `VerifierWorker` runs it in its own thread for many devices; `LocalVerifier` runs an
engine for each reply, with one slot, in the thread of the reply (`edgellm.verifier.in_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Protocol

import numpy as np

from edgellm.engine import Ids, Rows, SeqRows, common_prefix
from edgellm.errors import EdgeError
from edgellm.spec.types import NO_IDS, Chunk, Floats, Verdict
from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.extra_drafts import ExtraDrafts
from edgellm.verifier.judgement import Answer, Counters, Deliver, Job, MissingPrefix, cut, survives
from edgellm.verifier.kv_slots import SlotTable
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, Scheduler


class ModelRunner(Protocol):
    """The part of `edgellm.engine.Context` that the engine uses; it has one sequence for each slot."""

    @property
    def lazy_head(self) -> object | None: ...

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]: ...

    def decode_lazy(self, ids: Ids, *, seq: int = 0, outputs: int = 1, reached: Sequence[float] = ()) -> Rows: ...

    def cached(self, seq: int = 0) -> Ids: ...

    def sync(self, ids: Ids, seq: int = 0) -> int: ...

    def rollback(self, length: int, seq: int = 0) -> None: ...

    def copy_prefix(self, src: int, dst: int, length: int) -> None: ...

    def clear(self, seq: int = 0) -> None: ...

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None: ...

    def close(self) -> None: ...


class VerifierEngine:
    """An engine for verify requests, one per session at a time."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], scheduler: Scheduler,
        extra_drafts: ExtraDrafts | None = None,
    ) -> None:  # fmt: skip
        """Compute on `runner`, which has `slots` sequences and is owned by the caller. `extra_drafts` drafts the extra
        tokens of a session that is alone; without it they are written one by one."""
        self._runner, self._extra_drafts = runner, extra_drafts
        self._is_eog = is_eog
        self._scheduler = scheduler
        self._slots = SlotTable(slots, runner.cached, runner.clear)
        self._deliver: dict[int, Deliver] = {}  # callbacks of waiting sessions
        self._queue: dict[int, Job] = {}  # requests without a slot, by session, oldest first
        self._running: dict[int, Job] = {}  # requests with a slot
        self._ready: dict[int, Job] = {}  # requests that can be computed, least recently served first
        self._followers: list[Job] = []  # requests that wait for another request's prefix
        self._totals: dict[str, int] = asdict(Counters())

    @property
    def counters(self) -> Counters:
        """Return the counters."""
        return Counters(**self._totals)

    @property
    def batches(self) -> int:
        """Return the number of batches computed so far."""
        return self._totals["batches"]

    @property
    def prefills(self) -> int:
        """Return the number of prefill batches computed so far."""
        return self._totals["prefills"]

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._queue) + len(self._running)

    def add(self, request: VerifyRequest, deliver: Deliver, arrival: int = 0) -> None:
        """Add a request, which arrived after the beginning of `arrival` prefill batches. `deliver` is called with the
        answer, unless the session is dropped first."""
        session = request.session
        slot = self._slots.slot(session)
        held = self._runner.cached(slot) if slot is not None else NO_IDS
        if request.position > len(held):
            deliver(MissingPrefix(len(held)))
            return
        ids = np.concatenate((held[: request.position], request.prefix)) if request.position else request.prefix
        job = Job(request, ids, arrival=arrival)
        self._deliver[session] = deliver
        self._queue[session] = job
        self._scheduler.on_request(job)
        if slot is not None:
            self._claim(job)  # An older request must not get its slot.

    def drop(self, session: int) -> None:
        """Remove the session and its waiting request."""
        for jobs in (self._queue, self._running, self._ready):
            jobs.pop(session, None)
        self._deliver.pop(session, None)
        self._slots.drop(session)

    def fail(self, error: EdgeError) -> None:
        """Answer all requests with `error`."""
        for session in [*self._queue, *self._running]:
            self._deliver[session](error)

    def step(self) -> bool:
        """Compute one batch; return False if there was none."""
        if self._followers:
            self._release_followers()
        if self._queue:
            self._claim_slots()
        batch = self._scheduler.next(self._ready.values(), self.prefills, self._slots.single_session)
        if batch is None:
            return False
        self._compute(batch)
        return True

    def answer(self, request: VerifyRequest) -> Answer:
        """Add a request, and compute until it is answered."""
        answers: list[Answer] = []
        self.add(request, answers.append)
        while not answers:
            self.step()
        return answers[0]

    def _compute(self, batch: ScheduledBatch[Job]) -> None:
        # llama.cpp computes adjacent streams together.
        work = batch.slices if len(batch.slices) == 1 else sorted(batch.slices, key=lambda piece: piece.request.slot)
        rows = []
        for job, tokens, outputs in work:
            ids = job.ids[job.computed : job.computed + tokens]
            if outputs > 1:
                ids = np.concatenate((ids, job.remaining.ids[: outputs - 1]))
            rows.append(SeqRows(job.slot, ids, outputs))
        began = perf_counter()
        try:
            logits = self._decode(work[0].request.remaining, rows)
        except EdgeError as error:
            for job, _, _ in work:
                self._fail(job, error)
            return
        except BaseException:  # An interrupted decode leaves an invalid cache.
            for job, _, _ in work:
                self._runner.clear(job.slot)
            raise
        seconds = perf_counter() - began
        self._count(batch)
        waiting = len(self._running)
        for (job, tokens, outputs), views in zip(work, logits, strict=True):
            job.seconds += seconds
            if outputs:
                self._judge(job, views, outputs - 1, seconds)
            else:
                job.computed += tokens
                self._requeue(job)
        self._scheduler.on_batch(batch, seconds, waiting - len(self._running))

    def _decode(self, draft: Chunk, rows: list[SeqRows]) -> list[Rows]:
        """Return the logits of the batch; for a single session lazily, so that only rows that are read are computed."""
        if len(rows) > 1 or rows[0].outputs <= 1 or self._runner.lazy_head is None:
            return list(self._runner.decode_rows(rows))
        single = rows[0]
        reached = survives(cut(draft, single.outputs - 1)[0])
        return [self._runner.decode_lazy(single.ids, seq=single.seq, outputs=single.outputs, reached=reached)]

    def _judge(self, job: Job, logits: Rows, drafted: int, seconds: float) -> None:
        """Judge the first `drafted` tokens, decoded in `seconds`; then answer, or continue with the rest."""
        began, written = perf_counter(), len(job.tokens)
        try:
            job.passes_in_slot += 1
            needs_pass = job.judge(logits, drafted, self._is_eog)
        except EdgeError as error:
            self._fail(job, error)
            return
        self._runner.rollback(job.computed, job.slot)
        if self._extra_drafts is not None and self._slots.single_session:
            if written:
                tokens = len(job.tokens) - written
                self._extra_drafts.observe(drafted, tokens, seconds + perf_counter() - began)
            if needs_pass and not len(job.remaining):
                job.remaining = self._extra_drafts.draft(job)
        job.seconds += perf_counter() - began
        if needs_pass:
            self._requeue(job)
        else:
            self._answer(job, job.verdict())

    def _fail(self, job: Job, error: EdgeError) -> None:
        self._runner.clear(job.slot)
        self._answer(job, error)

    def _answer(self, job: Job, answer: Answer) -> None:
        session = job.session
        del self._running[session]
        self._ready.pop(session, None)
        self._slots.release(session)
        if isinstance(answer, Verdict):
            self._totals["verdicts"] += 1
            self._totals["verified"] += answer.accepted + len(answer.tokens)
        self._deliver.pop(session)(answer)

    def _count(self, batch: ScheduledBatch[Job]) -> None:
        totals, sessions = self._totals, len(batch.slices)
        totals["batches"] += 1
        totals["prefills"] += batch.kind is BatchKind.PREFILL
        totals["shared"] += sessions > 1
        totals["widest"] = max(totals["widest"], sessions)
        totals["rows"] += sum(piece.tokens for piece in batch.slices)
        totals["evictions"] = self._slots.evictions

    def _requeue(self, job: Job) -> None:
        """Put a job at the end of the line."""
        job.arrival = self.prefills
        self._ready.pop(job.session, None)
        self._ready[job.session] = job

    # Slots.

    def _claim_slots(self) -> None:
        """Give slots to waiting requests: the oldest first, of the device with the fewest slots first."""
        refused: set[str] = set()
        for job in sorted(self._queue.values(), key=lambda job: self._slots.slots_of(job.device)):
            device = job.device
            if device in refused:
                continue
            if not self._claim(job) and not (self._preempt(device) and self._claim(job)):
                refused.add(device)  # The device's other requests get no slot either.

    def _claim(self, job: Job) -> bool:
        """Give a slot to a job; return False if there is none."""
        session = job.session
        fresh = self._slots.slot(session) is None
        slot = self._slots.claim(session, job.ids, job.request.tenant)
        if slot is None:
            return False
        del self._queue[session]
        self._running[session] = job
        job.slot, job.passes_in_slot = slot, 0
        self._start(job, fresh)
        return True

    def _preempt(self, device: str) -> bool:
        """Take a slot for `device` from a running job of another device: from the device with the most slots, or,
        if none has more than one, from a job that has run for long enough. That job continues when it gets a
        slot again. Return False if no device has more than its share."""
        slots = self._slots.slots_of(device)
        running = self._running.values()
        candidates = [job for job in running if self._slots.slots_of(job.device) >= slots + 2]
        if candidates:
            needed = max(self._slots.slots_of(job.device) for job in candidates)
            candidates = [job for job in candidates if self._slots.slots_of(job.device) == needed]
        elif not slots:
            candidates = [job for job in running if job.passes_in_slot >= max(_MIN_PASSES, len(job.ids) // 8)]
        if not candidates:
            return False
        job = max(candidates, key=lambda job: job.passes_in_slot)
        session = job.session
        del self._running[session]
        self._ready.pop(session, None)
        self._followers = [other for other in self._followers if other is not job]
        job.slot, job.computed, job.leader, job.common = -1, 0, None, 0
        self._slots.drop(session)
        self._queue[session] = job
        self._totals["preemptions"] += 1
        return True

    def _start(self, job: Job, fresh: bool) -> None:
        """Sync the slot's cache with the job; a `fresh` slot may copy from other sessions."""
        try:
            if fresh and self._share_prefix(job):
                return
            job.computed = self._runner.sync(job.ids, job.slot)
        except EdgeError as error:
            self._fail(job, error)
            return
        self._ready.pop(job.session, None)
        self._ready[job.session] = job

    def _share_prefix(self, job: Job) -> bool:
        """Copy a shared prefix from another session's cache; return True if the job must wait for a job that computes
        it.

        A copy has to save a chunk of prefill, because a cache is copied whole.
        """
        chunk = self._scheduler.limits.chunk
        ids = job.ids[:-1]  # The last token is decoded in any case.
        own = common_prefix(self._runner.cached(job.slot), ids)
        held_by, held = self._slots.longest_prefix(ids, exclude=job.slot)
        needed = max(own, held) + chunk
        for other in self._running.values():
            # A waiting job leads no other job.
            if other is not job and other.leader is None and _salt(other) == _salt(job):
                common = common_prefix(other.ids, ids)
                if common >= needed:
                    job.leader, job.common, needed = other, common, common + 1
        if job.leader is not None:
            self._followers.append(job)
            return True
        if held >= own + chunk:
            self._runner.copy_prefix(held_by, job.slot, held)
            self._totals["copied"] += held - own
        return False

    def _release_followers(self) -> None:
        """Start the jobs whose leader has computed the shared prefix, or has left."""
        waiting, self._followers = self._followers, []
        for job in waiting:
            leader = job.leader
            if self._running.get(job.session) is not job or leader is None:
                continue  # The job itself has left.
            if self._running.get(leader.session) is leader and leader.computed < job.common:
                self._followers.append(job)
                continue
            job.leader, job.common = None, 0
            self._start(job, fresh=True)


def _salt(job: Job) -> str:
    """Return the salt within which cached tokens are shared."""
    return job.request.tenant.cache_salt


_MIN_PASSES = 32  # passes after which a request may lose its slot to a device without one

"""The verifier engine: computes the requests of all sessions over one context, a batch at a time, and judges their
drafts. An engine is used by one thread at a time, as `edgellm.verifier.worker` sees to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgellm.engine import Floats, Ids, SeqRows, common_prefix
from edgellm.errors import EdgeError
from edgellm.spec.protocols import HERE, Tenant
from edgellm.verifier.scheduler import Counters, Job, Scheduler, Slice

if TYPE_CHECKING:
    from edgellm.verifier.extra_drafts import ExtraDrafts


class ModelRunner(Protocol):
    """The part of `edgellm.engine.Context` that the engine uses; it has one sequence for each slot."""

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]: ...
    def cached(self, seq: int = 0) -> Ids: ...
    def sync(self, ids: Ids, seq: int = 0) -> int: ...
    def rollback(self, length: int, seq: int = 0) -> None: ...
    def copy_prefix(self, src: int, dst: int, length: int) -> None: ...
    def clear(self, seq: int = 0) -> None: ...
    def fill(self, widths: Sequence[int]) -> None: ...
    def close(self) -> None: ...


class VerifierEngine:
    """An engine for verify requests, one per session at a time."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], scheduler: Scheduler,
        extra_drafts: ExtraDrafts | None = None,
    ) -> None:  # fmt: skip
        """Compute on `runner`, which has `slots` sequences and is owned by the caller. `extra_drafts` drafts the extra
        tokens of a session that is alone; without it they are written one by one."""
        self._runner, self._extra_drafts, self._is_eog, self._scheduler = runner, extra_drafts, is_eog, scheduler
        self._slots = SlotTable(slots, runner.cached, runner.clear)
        self._queue: dict[int, Job] = {}  # requests without a slot, by session, oldest first
        self._running: dict[int, Job] = {}  # requests with a slot, least recently served first
        self.returning: set[int] = set()  # sessions of this process that are answered, and soon ask for more
        self.counters = Counters()

    def __len__(self) -> int:
        """Return the number of unanswered requests."""
        return len(self._queue) + len(self._running)

    @property
    def more_come(self) -> bool:
        """Return whether the next batch will have requests that are about to come. Who waits for a slot comes first."""
        return bool(self.returning) and not self._queue and len(self._running) + len(self.returning) > 1

    def add(self, job: Job) -> None:
        """Add a request, which gets its answer unless the session is dropped first."""
        self.returning.discard(job.session)
        self._queue[job.session] = job
        self._scheduler.record_request(job.device)
        if self._slots.slot(job.session) is not None:
            self._claim(job)  # An older request must not get its slot.

    def drop(self, session: int) -> None:
        """Remove the session and its waiting request."""
        self.returning.discard(session)
        self._queue.pop(session, None)
        self._running.pop(session, None)
        self._slots.drop(session)

    def fail(self, error: EdgeError) -> None:
        """Answer all requests with `error`."""
        for job in (*self._queue.values(), *self._running.values()):
            with suppress(InvalidStateError):  # A request that came last may have its error.
                job.answer.set_exception(error)

    def step(self) -> bool:
        """Compute one batch; return False if there was none."""
        if self._queue:
            self._claim_slots()
        batch = self._scheduler.next(self._running.values(), self.counters.prefills, self._slots.single_session)
        if batch:
            self._compute(batch)
        return bool(batch)

    def _compute(self, batch: Sequence[Slice]) -> None:
        work = sorted(batch, key=lambda piece: piece.request.slot)  # llama.cpp computes adjacent streams together.
        rows = []
        for job, tokens, outputs in work:
            start = job.request.computed
            ids = job.ids[start : start + tokens]
            if outputs > 1:
                ids = np.concatenate((ids, job.remaining.ids[: outputs - 1]))
            rows.append(SeqRows(job.slot, ids, outputs))
        began = perf_counter()
        try:
            logits = self._runner.decode_rows(rows)
        except EdgeError as error:
            for job, _, _ in work:
                self._fail(job, error)
            return
        seconds, waiting = perf_counter() - began, len(self._running)
        self._count(work)
        for (job, tokens, outputs), views in zip(work, logits, strict=True):
            job.seconds += seconds
            if outputs:
                self._judge(job, views, outputs - 1, seconds)
            else:
                job.request.computed += tokens
                self._requeue(job)
        self._scheduler.on_batch(work, seconds, waiting - len(self._running))

    def _judge(self, job: Job, logits: Floats, drafted: int, seconds: float) -> None:
        """Judge the first `drafted` tokens, decoded in `seconds`; then answer, or continue with the rest."""
        began, written = perf_counter(), len(job.tokens)
        try:
            needs_pass = job.judge(logits, drafted, self._is_eog)
        except EdgeError as error:
            self._fail(job, error)
            return
        self._runner.rollback(job.request.computed, job.slot)
        if self._extra_drafts is not None and self._slots.single_session:
            if written:
                self._extra_drafts.observe(drafted, len(job.tokens) - written, seconds + perf_counter() - began)
            if needs_pass and not len(job.remaining):
                job.remaining = self._extra_drafts.draft(job)
        job.seconds += perf_counter() - began
        if needs_pass:
            self._requeue(job)
        else:
            self._leave(job)
            self.counters.add(verdicts=1)
            if job.request.tenant is HERE:
                self.returning.add(job.session)
            job.answer.set_result(job.verdict())

    def _fail(self, job: Job, error: EdgeError) -> None:
        self._runner.clear(job.slot)
        self._leave(job)
        job.answer.set_exception(error)

    def _leave(self, job: Job) -> None:
        del self._running[job.session]
        self._slots.release(job.session)

    def _count(self, batch: Sequence[Slice]) -> None:
        counters, sessions = self.counters, len(batch)
        counters.add(
            batches=1, prefills=not batch[0].outputs, shared=sessions > 1,
            rows=sum(piece.tokens for piece in batch), evictions=self._slots.evictions - counters.evictions,
        )  # fmt: skip

    def _requeue(self, job: Job) -> None:
        """Put a job at the end of the line."""
        job.arrival = self.counters.prefills
        self._running[job.session] = self._running.pop(job.session)

    def _claim_slots(self) -> None:
        """Give slots to waiting requests: the oldest first, of the device with the fewest slots first."""
        refused: set[str] = set()
        for job in sorted(self._queue.values(), key=lambda job: self._slots.slots_of(job.device)):
            if job.device in refused or self._claim(job) or (self._preempt(job.device) and self._claim(job)):
                continue
            refused.add(job.device)  # The device's other requests get no slot either.

    def _claim(self, job: Job) -> bool:
        """Give a slot to a job, and sync its cache; return False if there is none."""
        fresh = self._slots.slot(job.session) is None
        slot = self._slots.claim(job.session, job.ids, job.request.tenant)
        if slot is None:
            return False
        del self._queue[job.session]
        job.slot = slot
        self._running.pop(job.session, None)
        self._running[job.session] = job
        try:
            if fresh:
                self._share_prefix(job)
            job.request.computed = job.request.cached = self._runner.sync(job.ids, slot)
        except EdgeError as error:
            self._fail(job, error)
        return True

    def _preempt(self, device: str) -> bool:
        """Take a slot for `device` from a running job of the device with the most slots, which continues when it gets
        one again. Return False if no device has more than its share."""
        most = max((self._slots.slots_of(job.device) for job in self._running.values()), default=0)
        if most < self._slots.slots_of(device) + 2:
            return False
        job = next(job for job in reversed(self._running.values()) if self._slots.slots_of(job.device) == most)
        self.drop(job.session)
        job.slot, job.request.computed = -1, 0
        self._queue[job.session] = job
        self.counters.add(preemptions=1)
        return True

    def _share_prefix(self, job: Job) -> None:
        """Copy a shared prefix from another session's cache to a fresh slot. A copy has to save a chunk of prefill,
        because a cache is copied whole."""
        ids = job.ids[:-1]  # The last token is decoded in any case.
        own = common_prefix(self._runner.cached(job.slot), ids)
        held_by, held = self._slots.longest_prefix(ids, exclude=job.slot)
        if held >= own + self._scheduler.limits.chunk:
            self._runner.copy_prefix(held_by, job.slot, held)
            self.counters.add(copied=held - own)


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    pinned: bool = False
    used: int = 0  # time of last use, on the table's own clock
    tenant: Tenant = HERE  # tenant of the last owner


class SlotTable:
    """The assignment of sessions to slots (sequences of one context), which cache tokens.

    A session gets a slot with its first request and keeps it until its end, or until its eviction (LRU) by a session
    that needs a slot. A session is evicted only by a session of the same device, or of a device with fewer slots.
    During a request its slot is pinned. The tokens of an ended session stay cached: a new session with the same prefix,
    such as the next turn of a chat, gets that slot.
    """

    def __init__(self, slots: int, cached: Callable[[int], Ids], clear: Callable[[int], None]) -> None:
        """Use `cached(slot)`, which returns the tokens cached in a slot, and `clear(slot)`, which removes them before a
        session with another `cache_salt` gets the slot."""
        self._slots = [_Slot() for _ in range(slots)]
        self._by_session: dict[int, int] = {}  # slot by session
        self._cached, self._clear = cached, clear
        self._clock = 0
        self.evictions = 0

    def slot(self, session: int) -> int | None:
        """Return the slot of `session`, if any."""
        return self._by_session.get(session)

    def slots_of(self, device: str) -> int:
        """Return the number of slots of `device`."""
        return sum(slot.owner is not None and slot.tenant.device == device for slot in self._slots)

    @property
    def single_session(self) -> bool:
        """Return whether at most one session has a slot."""
        return len(self._by_session) < 2

    def claim(self, session: int, ids: Ids, tenant: Tenant = HERE) -> int | None:
        """Pin a slot for a request of `session` on the tokens `ids` (n,), and return it; None if none is available."""
        index = self._by_session.get(session)
        if index is None:
            index = self._choose(ids, tenant)
            if index is None:
                return None
            slot = self._slots[index]
            if slot.owner is not None:
                del self._by_session[slot.owner]
                self.evictions += 1
            if slot.tenant.cache_salt != tenant.cache_salt:
                self._clear(index)
            self._by_session[session] = index
            slot.owner, slot.tenant = session, tenant
        self._pin(index, True)
        return index

    def release(self, session: int) -> None:
        """Unpin the slot of an answered request, so that it can be evicted."""
        if session in self._by_session:
            self._pin(self._by_session[session], False)

    def drop(self, session: int) -> None:
        """Remove the session; its cached tokens may serve another session."""
        index = self._by_session.pop(session, None)
        if index is not None:
            self._slots[index].owner, self._slots[index].pinned = None, False

    def longest_prefix(self, ids: Ids, exclude: int) -> tuple[int, int]:
        """Return the slot other than `exclude` that shares the longest prefix with `ids` (n,), and the length of that
        prefix. Only slots with the same `cache_salt` as `exclude` are considered."""
        salt = self._slots[exclude].tenant.cache_salt
        alike = [i for i, slot in enumerate(self._slots) if i != exclude and slot.tenant.cache_salt == salt]
        found = ((i, common_prefix(self._cached(i), ids)) for i in alike)
        return max(found, key=lambda one: one[1], default=(exclude, 0))

    def _pin(self, index: int, pinned: bool) -> None:
        self._clock += 1
        self._slots[index].pinned, self._slots[index].used = pinned, self._clock

    def _choose(self, ids: Ids, tenant: Tenant) -> int | None:
        """Return the unowned slot with the longest reusable prefix of `ids`, else an empty slot, else the LRU slot; if
        all are owned, the LRU idle slot that `tenant` may take."""
        free = [i for i, slot in enumerate(self._slots) if slot.owner is None]
        if free:
            return max(free, key=lambda i: (*self._reuse_value(i, ids, tenant), -self._slots[i].used))
        held = self.slots_of(tenant.device)
        idle = [
            i for i, slot in enumerate(self._slots) if not slot.pinned
            and (slot.tenant.device == tenant.device or self.slots_of(slot.tenant.device) > held)
        ]  # fmt: skip
        return min(idle, key=lambda i: self._slots[i].used, default=None)

    def _reuse_value(self, slot: int, ids: Ids, tenant: Tenant) -> tuple[int, bool]:
        """Return how many tokens a session with `ids` need not compute in `slot`, and whether the slot is empty.

        A prefix counts only if it is most of the cache: a short common template is no reason to evict a prompt.
        """
        cached = self._cached(slot)
        common = common_prefix(cached, ids) if self._slots[slot].tenant.cache_salt == tenant.cache_salt else 0
        return (common if 2 * common >= len(cached) else 0), not len(cached)

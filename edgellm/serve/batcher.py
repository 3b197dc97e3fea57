"""The verifier's worker: one thread that owns the context and computes for all sessions together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import numpy as np

from edgellm.engine import Rows, SeqRows, known
from edgellm.errors import EdgeError, EngineFailed
from edgellm.serve.fairness import HERE, PassCost, Tenant, Turns
from edgellm.serve.jobs import Answer, Counters, Deliver, Job, Missing, Pace, Request
from edgellm.serve.scheduler import Batch, Kind, Limits, Want, next_batch
from edgellm.serve.sessions import SessionTable, common_prefix
from edgellm.serve.wire import Ask
from edgellm.spec.local import survives
from edgellm.spec.records import NO_IDS, Chunk, Floats, Ids, Sampling, Verdict
from edgellm.spec.sampling import logprobs
from edgellm.spec.verify import judge, plausible


class Engine(Protocol):
    """What the worker needs of a context with one stream of tokens per sequence (`edgellm.engine.Context`)."""

    @property
    def late(self) -> object | None: ...

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]: ...

    def decode_late(self, ids: Ids, *, seq: int = 0, outputs: int = 1, reached: Sequence[float] = ()) -> Rows: ...

    def cached(self, seq: int = 0) -> Ids: ...

    def sync(self, ids: Ids, seq: int = 0) -> int: ...

    def rollback(self, length: int, seq: int = 0) -> None: ...

    def copy_prefix(self, src: int, dst: int, length: int) -> None: ...

    def clear(self, seq: int = 0) -> None: ...

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None: ...

    def close(self) -> None: ...


class Batcher:
    """Takes requests from any thread, answers them from its own."""

    def __init__(
        self, context: Engine, slots: int, is_eog: Callable[[int], bool], limits: Limits | None = None
    ) -> None:
        """`context` has `slots` sequences; it is used by the worker alone and closed with it."""
        self._context = context
        self._is_eog = is_eog
        self._limits = limits or Limits()
        self._table = SessionTable(slots, context.cached, context.clear)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queue: dict[int, Job] = {}  # requests without a slot, and requests with one: by session, which
        self._jobs: dict[int, Job] = {}  #  has one at a time; oldest first
        self._wants: dict[int, Want] = {}  # of the jobs that can be computed, least recently served first
        self._followers: list[Job] = []  # the jobs that wait for another one's prefix
        self._totals = asdict(Counters())
        self._pace = Pace()
        self._turns, self._cost = Turns(), PassCost()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def counters(self) -> Counters:
        """What has been done so far."""
        return Counters(**self._totals)

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet, about."""
        return len(self._queue) + len(self._jobs) + self._inbox.qsize()

    def wait_seconds(self) -> float:
        """How long it will take to answer what waits now, going by the answers of late."""
        return self._pace.seconds(self.waiting)

    def submit(self, session: int, sampling: Sampling, ask: Ask, deliver: Deliver, tenant: Tenant = HERE) -> None:
        """Asks for a verdict for `tenant`, always the same one for a session. `deliver` is called from the worker's
        thread, unless the session leaves before.

        Where the worker has ended it may be called twice, with the same error.
        """
        since = self._totals["prefills"]  # now, since one that is being computed goes ahead of this request
        self._inbox.put(lambda: self._admit(session, tenant, sampling, ask, deliver, since))
        if self._over:  # perhaps nobody hears it any more
            deliver(_ended())

    def leave(self, session: int) -> None:
        """The session is over; a request of it that still waits is forgotten."""
        self._inbox.put(lambda: self._forget(session))

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`: for batches of one session."""
        self._inbox.put(lambda: self._context.fill(widths, heads))

    def close(self) -> None:
        """Ends the thread after the batch that it is computing, and closes the context."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._context.close()

    def _run(self) -> None:
        try:
            while self._hear():
                self._release_followers()
                self._claim_slots()
                batch = self._next()
                if batch is not None:
                    self._compute(batch)
        finally:
            self._over = True
            for job in [*self._queue.values(), *self._jobs.values()]:
                job.request.deliver(_ended())

    def _next(self) -> Batch | None:
        """The next batch: as in the paper, and by turns where several devices ask."""
        wants, prefills = self._wants.values(), self._totals["prefills"]
        if not self._turns.shared():
            return next_batch(wants, self._limits, prefills, self._table.alone)
        return next_batch(self._turns.order(wants), self._limits, prefills, budget=self._cost.budget(self._limits))

    def _hear(self) -> bool:
        """Takes in what has arrived, waiting for it where there is nothing to do. False: it is time to go."""
        while not (self._jobs or self._queue) or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True

    def _admit(self, session: int, tenant: Tenant, sampling: Sampling, ask: Ask, deliver: Deliver, since: int) -> None:
        slot = self._table.slot(session)
        held = self._context.cached(slot) if slot is not None else NO_IDS
        if ask.position > len(held):
            deliver(Missing(len(held)))
            return
        ids = np.concatenate((held[: ask.position], ask.prefix))
        request = Request(session, tenant, sampling, ids, ask.chunk, ask.extra, since, deliver, ask.logprobs)
        job = self._queue[session] = Job(request, ids, ask.chunk)
        self._turns.asked(tenant.device)
        if slot is not None:
            self._claim(job)  # now, lest its slot goes to an older request while it waits

    def _claim_slots(self) -> None:
        """Gives slots to requests that wait for one: the oldest first, of the device that has the fewest."""
        refused: set[str] = set()
        waiting = list(self._queue.values())
        if self._turns.shared():
            waiting.sort(key=lambda job: self._table.held(job.request.tenant.device))
        for job in waiting:
            device = job.request.tenant.device
            if device in refused:
                continue
            if not self._claim(job) and not (self._preempt(device) and self._claim(job)):
                refused.add(device)  # so do its other requests

    def _claim(self, job: Job) -> bool:
        """Gives a slot to a request; False where it gets none."""
        request = job.request
        fresh = self._table.slot(request.session) is None
        slot = self._table.claim(request.session, job.ids, request.tenant)
        if slot is None:
            return False
        del self._queue[request.session]
        self._jobs[request.session] = job
        job.slot, job.held = slot, 0
        self._start(job, fresh)
        return True

    def _preempt(self, device: str) -> bool:
        """Takes a slot from a request of another device, which goes on when it gets one again, so that `device` gets
        it: from the device with the most slots, or, where none has more than one, from a request that has had its
        portion. False where nobody has more than is due."""
        mine = self._table.held(device)
        due = [job for job in self._jobs.values() if self._table.held(job.request.tenant.device) >= mine + 2]
        if due:
            most = max(self._table.held(job.request.tenant.device) for job in due)
            due = [job for job in due if self._table.held(job.request.tenant.device) == most]
        elif not mine:
            due = [job for job in self._jobs.values() if job.held >= max(_PORTION, len(job.ids) // 8)]
        if not due:
            return False
        job = max(due, key=lambda job: job.held)
        session = job.request.session
        del self._jobs[session]
        self._wants.pop(session, None)
        self._followers = [other for other in self._followers if other is not job]
        job.slot, job.done, job.leader, job.common = -1, 0, None, 0
        self._table.drop(session)
        self._queue[session] = job
        self._totals["preemptions"] += 1
        return True

    def _start(self, job: Job, fresh: bool) -> None:
        """Brings the slot in line with the job; where the slot is `fresh`, with the help of the others."""
        try:
            if fresh and self._shares(job):
                return
            job.done = self._context.sync(job.ids, job.slot)
        except EdgeError as error:
            self._fail(job, error)
            return
        self._want(job, job.request.since)

    def _shares(self, job: Job) -> bool:
        """Copies the beginning of a job from another session's cache; True: it waits, as another job computes it now.

        Only where that saves a chunk of prefill: a cache is copied whole.
        """
        ids = job.ids[:-1]  # the last one is decoded in any case
        own = common_prefix(self._context.cached(job.slot), ids)
        held_by, held = self._table.likest(ids, but=job.slot)
        most = max(own, held) + self._limits.chunk
        for other in self._jobs.values():
            if other is not job and other.leader is None and _alike(other, job):  # nobody waits for one who waits
                common = common_prefix(other.ids, ids)
                if common >= most:
                    job.leader, job.common, most = other, common, common + 1
        if job.leader is not None:
            self._followers.append(job)
            return True
        if held >= own + self._limits.chunk:
            self._context.copy_prefix(held_by, job.slot, held)
            self._totals["copied"] += held - own
        return False

    def _release_followers(self) -> None:
        """Goes on with the jobs whose leader has computed what they share, or has left."""
        waiting, self._followers = self._followers, []
        for job in waiting:
            leader = job.leader
            if self._jobs.get(job.request.session) is not job or leader is None:
                continue  # it has left itself
            if self._jobs.get(leader.request.session) is leader and leader.done < job.common:
                self._followers.append(job)
                continue
            job.leader, job.common = None, 0
            self._start(job, fresh=True)

    def _want(self, job: Job, since: int) -> None:
        """Lines a job up for the next batch, behind the others."""
        session = job.request.session
        self._wants.pop(session, None)
        device = job.request.tenant.device
        self._wants[session] = Want(session, len(job.ids) - job.done, len(job.chunk), since, device)

    def _forget(self, session: int) -> None:
        self._queue.pop(session, None)
        self._jobs.pop(session, None)
        self._wants.pop(session, None)
        self._table.drop(session)

    def _compute(self, batch: Batch) -> None:
        # llama.cpp computes streams together where they follow each other
        work = sorted(((self._jobs[share.session], share) for share in batch.shares), key=lambda pair: pair[0].slot)
        rows = []
        for job, share in work:
            ids = job.ids[job.done : job.done + share.tokens]
            if share.outputs:
                ids = np.concatenate((ids, job.chunk.ids[: share.outputs - 1]))
            rows.append(SeqRows(job.slot, ids, share.outputs))
        began = perf_counter()
        try:
            logits = self._decoded(work[0][0].chunk, rows)
        except EdgeError as error:
            for job, _ in work:
                self._fail(job, error)
            return
        seconds = perf_counter() - began
        self._count(batch)
        self._cost.add(sum(share.weight for share in batch.shares), seconds)
        self._turns.served({job.request.tenant.device for job, _ in work})
        before = len(self._jobs)
        for (job, share), views in zip(work, logits, strict=True):
            job.seconds += seconds
            if share.outputs:
                self._judge(job, views, share.outputs - 1)
            else:
                job.done += share.tokens
                self._want(job, self._totals["prefills"])
        self._pace.batch(seconds, before - len(self._jobs))

    def _decoded(self, chunk: Chunk, rows: list[SeqRows]) -> list[Rows]:
        """Logits of the batch; where it is of one session alone, which brings `chunk`, those that are looked at."""
        if len(rows) > 1 or rows[0].outputs <= 1 or self._context.late is None:
            return list(self._context.decode_rows(rows))
        only = rows[0]
        reached = survives(_cut(chunk, only.outputs - 1)[0])
        return [self._context.decode_late(only.ids, seq=only.seq, outputs=only.outputs, reached=reached)]

    def _judge(self, job: Job, logits: Rows, drafted: int) -> None:
        """Applies the rule to the first `drafted` tokens of a chunk, which are decoded; then either answers, or goes on
        with the others, or with the verifier's own last token."""
        request = job.request
        chunk, rest = _cut(job.chunk, drafted)
        try:
            accepted, token = judge(chunk, logits, request.sampling, position=len(job.ids))
        except EdgeError as error:
            self._fail(job, error)
            return
        job.passes += 1
        job.held += 1
        if not job.tokens:
            job.accepted += accepted
            if chunk.retrieved:
                job.plausible += plausible(chunk, logits, accepted)
        more = accepted == drafted and len(rest) > 0
        if not more:
            job.tokens.append(token)
        goes_on = more or (len(job.tokens) <= request.extra and not self._is_eog(token))
        if goes_on or request.logprobs is not None:
            stands = chunk.ids[:accepted] if more else np.append(chunk.ids[:accepted], np.int32(token))
        if request.logprobs is not None and len(stands):
            job.logprobs.extend(logprobs(known(logits, len(stands)), stands, request.logprobs))
        job.done = len(job.ids) + accepted - more  # the last token is decoded again: its row judges the next one
        self._context.rollback(job.done, job.slot)
        if goes_on:
            job.ids = np.concatenate((job.ids, stands))
            job.chunk = rest if more else _NOTHING
            self._want(job, self._totals["prefills"])
            return
        tokens = np.array(job.tokens, np.int32)
        said = tuple(job.logprobs)
        likely = None
        if (asked := request.chunk).retrieved:  # of what was not decoded nothing is known to the contrary
            likely = (*job.plausible, *[True] * (len(asked) - len(job.plausible)))
        verdict = Verdict(job.accepted, tokens, job.seconds, passes=job.passes, plausible=likely, logprobs=said)
        self._answer(job, verdict)

    def _fail(self, job: Job, error: EdgeError) -> None:
        self._context.clear(job.slot)
        self._answer(job, error)

    def _answer(self, job: Job, answer: Answer) -> None:
        session = job.request.session
        del self._jobs[session]
        self._wants.pop(session, None)
        self._table.release(session)
        if isinstance(answer, Verdict):
            self._totals["verdicts"] += 1
            self._totals["verified"] += answer.accepted + len(answer.tokens)
        job.request.deliver(answer)

    def _count(self, batch: Batch) -> None:
        totals, sessions = self._totals, len(batch.shares)
        totals["batches"] += 1
        totals["prefills"] += batch.kind is Kind.PREFILL
        totals["shared"] += sessions > 1
        totals["widest"] = max(totals["widest"], sessions)
        totals["rows"] += sum(share.tokens for share in batch.shares)
        totals["evictions"] = self._table.evictions


def _ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")


def _alike(one: Job, other: Job) -> bool:
    """Whether the two may share what is cached."""
    return one.request.tenant.cache_salt == other.request.tenant.cache_salt


def _cut(chunk: Chunk, n: int) -> tuple[Chunk, Chunk]:
    """The first `n` tokens of a chunk, and the others."""
    if n >= len(chunk):
        return chunk, _NOTHING
    drawn, left = chunk.distributions, len(chunk) - n
    first, rest = (None, None) if drawn is None else (drawn[:n], drawn[n:])
    head = Chunk(
        chunk.ids[:n], chunk.confidence[:n], distributions=first, retrieved=chunk.retrieved,
        tail=max(0, chunk.tail - left),
    )  # fmt: skip
    tail = Chunk(
        chunk.ids[n:], chunk.confidence[n:], distributions=rest, retrieved=chunk.retrieved,
        tail=min(chunk.tail, left),
    )  # fmt: skip
    return head, tail


_NOTHING = Chunk()
_PORTION = 32  # passes after which a request may lose its slot to a device that has none

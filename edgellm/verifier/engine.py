"""The verifier engine: computes the requests of all sessions over one context, a batch at a time, and judges their
drafts.

It belongs to one thread. `edgellm.verifier.worker` runs it in a thread of its own, for many devices; in process it has
one slot, and runs in the thread of the reply (`edgellm.verifier.in_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Protocol

import numpy as np

from edgellm.engine import Ids, Rows, SeqRows, common_prefix, known
from edgellm.engine.vocabulary import Floats
from edgellm.errors import EdgeError
from edgellm.spec.sampling import logprobs
from edgellm.spec.types import NO_IDS, Chunk, Verdict
from edgellm.spec.verification import judge, plausible
from edgellm.verifier.kv_slots import SlotTable
from edgellm.verifier.requests import Answer, Counters, Deliver, MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, Scheduler


def judge_pass(request: VerifyRequest, rows: Rows, drafted: int, is_eog: Callable[[int], bool]) -> bool:
    """Apply the rule to the first `drafted` tokens left of the draft; return whether another pass is needed.

    `rows` (drafted + 1, n_vocab) are logits: row i says what comes at place i. The tokens in the request's sequence
    that stand are the first `computed` ones afterwards. Raises EngineFailed where the logits are no numbers.
    """
    chunk, rest = cut(request.left, drafted)
    before = request.before
    accepted, token = judge(chunk, rows, request.sampling, position=before)
    request.passes += 1
    request.held += 1
    if not request.tokens:
        request.accepted += accepted
        if chunk.retrieved:
            request.plausible += plausible(chunk, rows, accepted)
    more = accepted == drafted and len(rest) > 0
    if not more:
        request.tokens.append(token)
    goes_on = more or (len(request.tokens) <= request.extra and not is_eog(token))
    # the last token is decoded again: its row judges the next one
    request.computed = before + accepted - more
    if goes_on or request.logprobs is not None:
        stands = chunk.ids[:accepted] if more else np.append(chunk.ids[:accepted], np.int32(token))
        if request.logprobs is not None and len(stands):
            request.said.extend(logprobs(known(rows, len(stands)), stands, request.logprobs))
        request.ids = np.concatenate((request.ids, stands))
        request.left = rest if more else NOTHING
    return goes_on


def verdict(request: VerifyRequest) -> Verdict:
    """Return the verdict of a request that needs no further pass."""
    likely = None
    if request.draft.retrieved:  # tokens that were not decoded count as plausible
        likely = (*request.plausible, *[True] * (len(request.draft) - len(request.plausible)))
    tokens, said = np.array(request.tokens, np.int32), tuple(request.said)
    return Verdict(request.accepted, tokens, request.seconds, passes=request.passes, plausible=likely, logprobs=said)


def survives(chunk: Chunk) -> list[float]:
    """Return for each token the chance, as its drafter saw it, that it and all before it stand; shape (n,)."""
    drafted = 0 if chunk.retrieved else len(chunk) - chunk.tail
    return [*chunk.confidence[:drafted].cumprod().tolist(), *chunk.confidence[drafted:].tolist()]


def cut(chunk: Chunk, n: int) -> tuple[Chunk, Chunk]:
    """Return the first `n` tokens of a draft, and the rest."""
    if n >= len(chunk):
        return chunk, NOTHING
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


NOTHING = Chunk()


class ModelRunner(Protocol):
    """The engine's view of a context with one sequence for each slot (`edgellm.engine.Context`)."""

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


class VerifierEngine:
    """Answers verify requests. A session has one at a time."""

    def __init__(self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], scheduler: Scheduler) -> None:
        """Compute on `runner`, which has `slots` sequences; closing it stays the caller's job."""
        self._runner = runner
        self._is_eog = is_eog
        self._scheduler = scheduler
        self._slots = SlotTable(slots, runner.cached, runner.clear)
        self._deliver: dict[int, Deliver] = {}  # by session that waits for an answer
        self._queue: dict[int, VerifyRequest] = {}  # requests without a slot, by session, the oldest first
        self._running: dict[int, VerifyRequest] = {}  # requests with a slot
        self._ready: dict[int, VerifyRequest] = {}  # requests that can be computed, least recently served first
        self._followers: list[VerifyRequest] = []  # requests that wait for another request's prefix
        self._totals: dict[str, int] = asdict(Counters())

    @property
    def counters(self) -> Counters:
        """Return what has been done so far."""
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
        """Return how many requests are not answered yet."""
        return len(self._queue) + len(self._running)

    def add(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Take a request; `deliver` is called with the answer, unless the session is dropped before."""
        session = request.session
        slot = self._slots.slot(session)
        held = self._runner.cached(slot) if slot is not None else NO_IDS
        if request.position > len(held):
            deliver(MissingPrefix(len(held)))
            return
        request.ids = np.concatenate((held[: request.position], request.prefix)) if request.position else request.prefix
        self._deliver[session] = deliver
        self._queue[session] = request
        self._scheduler.arrived(request)
        if slot is not None:
            self._claim(request)  # now, lest its slot goes to an older request while it waits

    def drop(self, session: int) -> None:
        """Forget the session, and a request of it that still waits."""
        for requests in (self._queue, self._running, self._ready):
            requests.pop(session, None)
        self._deliver.pop(session, None)
        self._slots.drop(session)

    def fail(self, error: EdgeError) -> None:
        """Answer everything that waits with `error`."""
        for session in [*self._queue, *self._running]:
            self._deliver[session](error)

    def step(self) -> bool:
        """Compute one batch; return whether there was one."""
        if self._followers:
            self._release_followers()
        if self._queue:
            self._claim_slots()
        batch = self._scheduler.next(self._ready.values(), self.prefills, self._slots.alone)
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

    def _compute(self, batch: ScheduledBatch[VerifyRequest]) -> None:
        # llama.cpp computes streams together where they follow each other
        work = batch.slices if len(batch.slices) == 1 else sorted(batch.slices, key=lambda piece: piece.request.slot)
        rows = []
        for request, tokens, outputs in work:
            ids = request.ids[request.computed : request.computed + tokens]
            if outputs > 1:
                ids = np.concatenate((ids, request.left.ids[: outputs - 1]))
            rows.append(SeqRows(request.slot, ids, outputs))
        began = perf_counter()
        try:
            logits = self._decoded(work[0].request.left, rows)
        except EdgeError as error:
            for request, _, _ in work:
                self._fail(request, error)
            return
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            for request, _, _ in work:
                self._runner.clear(request.slot)
            raise
        seconds = perf_counter() - began
        self._count(batch)
        waiting = len(self._running)
        for (request, tokens, outputs), views in zip(work, logits, strict=True):
            request.seconds += seconds
            if outputs:
                self._judge(request, views, outputs - 1)
            else:
                request.computed += tokens
                self._requeue(request)
        self._scheduler.computed(batch, seconds, waiting - len(self._running))

    def _decoded(self, draft: Chunk, rows: list[SeqRows]) -> list[Rows]:
        """Return the logits of the batch; for a batch of one session, which brings `draft`, only the rows that are
        looked at."""
        if len(rows) > 1 or rows[0].outputs <= 1 or self._runner.late is None:
            return list(self._runner.decode_rows(rows))
        only = rows[0]
        reached = survives(cut(draft, only.outputs - 1)[0])
        return [self._runner.decode_late(only.ids, seq=only.seq, outputs=only.outputs, reached=reached)]

    def _judge(self, request: VerifyRequest, logits: Rows, drafted: int) -> None:
        """Judge the first `drafted` tokens, which are decoded; then answer, or go on with what is left."""
        began = perf_counter()
        try:
            goes_on = judge_pass(request, logits, drafted, self._is_eog)
        except EdgeError as error:
            self._fail(request, error)
            return
        self._runner.rollback(request.computed, request.slot)
        request.seconds += perf_counter() - began
        if goes_on:
            self._requeue(request)
        else:
            self._answer(request, verdict(request))

    def _fail(self, request: VerifyRequest, error: EdgeError) -> None:
        self._runner.clear(request.slot)
        self._answer(request, error)

    def _answer(self, request: VerifyRequest, answer: Answer) -> None:
        session = request.session
        del self._running[session]
        self._ready.pop(session, None)
        self._slots.release(session)
        if isinstance(answer, Verdict):
            self._totals["verdicts"] += 1
            self._totals["verified"] += answer.accepted + len(answer.tokens)
        self._deliver.pop(session)(answer)

    def _count(self, batch: ScheduledBatch[VerifyRequest]) -> None:
        totals, sessions = self._totals, len(batch.slices)
        totals["batches"] += 1
        totals["prefills"] += batch.kind is BatchKind.PREFILL
        totals["shared"] += sessions > 1
        totals["widest"] = max(totals["widest"], sessions)
        totals["rows"] += sum(piece.tokens for piece in batch.slices)
        totals["evictions"] = self._slots.evictions

    def _requeue(self, request: VerifyRequest) -> None:
        """Line a request up behind the others."""
        request.arrival = self.prefills
        self._ready.pop(request.session, None)
        self._ready[request.session] = request

    # Slots.

    def _claim_slots(self) -> None:
        """Give slots to requests that wait for one: the oldest first, of the device that has the fewest."""
        refused: set[str] = set()
        waiting = list(self._queue.values())
        if self._scheduler.shared():
            waiting.sort(key=lambda request: self._slots.held(request.device))
        for request in waiting:
            device = request.device
            if device in refused:
                continue
            if not self._claim(request) and not (self._preempt(device) and self._claim(request)):
                refused.add(device)  # its other requests get none either

    def _claim(self, request: VerifyRequest) -> bool:
        """Give a slot to a request; return False if there is none for it."""
        session = request.session
        fresh = self._slots.slot(session) is None
        slot = self._slots.claim(session, request.ids, request.tenant)
        if slot is None:
            return False
        del self._queue[session]
        self._running[session] = request
        request.slot, request.held = slot, 0
        self._start(request, fresh)
        return True

    def _preempt(self, device: str) -> bool:
        """Take a slot for `device` from a request of another device, which goes on when it gets a slot again: from
        the device with the most slots, or, where none has more than one, from a request that has had its portion.
        Return False if no device has more than its due."""
        mine = self._slots.held(device)
        running = self._running.values()
        due = [request for request in running if self._slots.held(request.device) >= mine + 2]
        if due:
            most = max(self._slots.held(request.device) for request in due)
            due = [request for request in due if self._slots.held(request.device) == most]
        elif not mine:
            due = [request for request in running if request.held >= max(_PORTION, len(request.ids) // 8)]
        if not due:
            return False
        request = max(due, key=lambda request: request.held)
        session = request.session
        del self._running[session]
        self._ready.pop(session, None)
        self._followers = [other for other in self._followers if other is not request]
        request.slot, request.computed, request.leader, request.common = -1, 0, None, 0
        self._slots.drop(session)
        self._queue[session] = request
        self._totals["preemptions"] += 1
        return True

    def _start(self, request: VerifyRequest, fresh: bool) -> None:
        """Bring the slot in line with the request; where the slot is `fresh`, with the help of the others."""
        try:
            if fresh and self._shares(request):
                return
            request.computed = self._runner.sync(request.ids, request.slot)
        except EdgeError as error:
            self._fail(request, error)
            return
        self._ready.pop(request.session, None)
        self._ready[request.session] = request

    def _shares(self, request: VerifyRequest) -> bool:
        """Copy the beginning from another session's cache; return True if the request has to wait for one that computes
        it.

        Only where that saves a chunk of prefill: a cache is copied whole.
        """
        chunk = self._scheduler.limits.chunk
        ids = request.ids[:-1]  # the last one is decoded in any case
        own = common_prefix(self._runner.cached(request.slot), ids)
        held_by, held = self._slots.likest(ids, but=request.slot)
        most = max(own, held) + chunk
        for other in self._running.values():
            if other is not request and other.leader is None and _alike(other, request):  # one that waits leads none
                common = common_prefix(other.ids, ids)
                if common >= most:
                    request.leader, request.common, most = other, common, common + 1
        if request.leader is not None:
            self._followers.append(request)
            return True
        if held >= own + chunk:
            self._runner.copy_prefix(held_by, request.slot, held)
            self._totals["copied"] += held - own
        return False

    def _release_followers(self) -> None:
        """Go on with the requests whose leader has computed what they share, or has left."""
        waiting, self._followers = self._followers, []
        for request in waiting:
            leader = request.leader
            if self._running.get(request.session) is not request or leader is None:
                continue  # it has left itself
            if self._running.get(leader.session) is leader and leader.computed < request.common:
                self._followers.append(request)
                continue
            request.leader, request.common = None, 0
            self._start(request, fresh=True)


def _alike(one: VerifyRequest, other: VerifyRequest) -> bool:
    """Return whether the two may share cached tokens."""
    return one.tenant.cache_salt == other.tenant.cache_salt


_PORTION = 32  # passes after which a request may lose its slot to a device that has none

"""The verifier engine: computes the requests of all sessions over one context, a batch at a time, and judges their
drafts.

It belongs to one thread: `VerifierWorker` runs it in its own thread for many devices; `LocalSession` runs it with one
slot in the thread of the reply (`edgellm.verifier.in_process`).
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
from edgellm.verifier.extra_drafts import ExtraDrafts
from edgellm.verifier.kv_slots import SlotTable
from edgellm.verifier.requests import Answer, Counters, Deliver, MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, Scheduler


def judge_pass(request: VerifyRequest, rows: Rows, drafted: int, is_eog: Callable[[int], bool]) -> bool:
    """Judge the first `drafted` tokens of the remaining draft, and the one after them if there is one; return whether
    another pass is needed.

    `rows` (drafted + 1, n_vocab) are logits: row i predicts place i. Afterwards, the first `computed` tokens of the
    request's sequence are valid. Raises EngineFailed if the logits contain NaN.
    """
    # the last row judges a further token, if the draft has one
    chunk, remaining_draft = cut(request.remaining, drafted + 1)
    start = request.prefix_length
    accepted, token = judge(chunk.ids[:drafted], rows, request.sampling, start, request.ids, request.grammar)
    whole = accepted == drafted < len(chunk) and token == int(chunk.ids[drafted])
    accepted += whole
    request.passes += 1
    request.passes_in_slot += 1
    extra = bool(request.tokens)  # the draft is our own, of extra tokens
    if extra:
        request.tokens.extend(chunk.ids[:accepted].tolist())
    else:
        request.accepted += accepted
        if chunk.retrieved:
            request.plausible += plausible(chunk, rows, accepted)
    drafts_stand = accepted > 0 or (request.accepted > 0 and not extra)
    ended = drafts_stand and is_eog(int((chunk.ids[:accepted] if accepted else request.ids)[-1]))
    continues = whole and not (extra and ended)
    bare = continues or (extra and ended)  # no token of the verifier's own follows the accepted ones
    if not bare:
        request.tokens.append(token)
    needs_pass = continues or (len(request.tokens) <= request.extra and not ended and not is_eog(token))
    request.computed = start + min(accepted, drafted)
    if needs_pass or request.logprobs is not None:
        kept = chunk.ids[:accepted] if bare else np.append(chunk.ids[:accepted], np.int32(token))
        if request.logprobs is not None and len(kept):
            request.token_logprobs.extend(logprobs(known(rows, len(kept)), kept, request.logprobs))
        request.ids = np.concatenate((request.ids, kept))
        request.remaining = remaining_draft if continues else NOTHING
    return needs_pass


def verdict(request: VerifyRequest) -> Verdict:
    """Return the verdict of a request that needs no further pass."""
    plausible_tokens = None
    if request.draft.retrieved:  # tokens that were not decoded count as plausible
        plausible_tokens = (*request.plausible, *[True] * (len(request.draft) - len(request.plausible)))
    tokens, token_logprobs = np.array(request.tokens, np.int32), tuple(request.token_logprobs)
    return Verdict(
        request.accepted,
        tokens,
        request.seconds,
        passes=request.passes,
        plausible=plausible_tokens,
        logprobs=token_logprobs,
    )


def survives(chunk: Chunk) -> list[float]:
    """Return for each token the probability, as its drafter saw it, that it and all before it are accepted; shape
    (n,)."""
    drafted = 0 if chunk.retrieved else len(chunk) - chunk.tail
    return [*chunk.confidence[:drafted].cumprod().tolist(), *chunk.confidence[drafted:].tolist()]


def cut(chunk: Chunk, n: int) -> tuple[Chunk, Chunk]:
    """Return the first `n` tokens of a draft, and the rest."""
    if n >= len(chunk):
        return chunk, NOTHING
    left = len(chunk) - n
    head = Chunk(chunk.ids[:n], chunk.confidence[:n], retrieved=chunk.retrieved, tail=max(0, chunk.tail - left))
    tail = Chunk(chunk.ids[n:], chunk.confidence[n:], retrieved=chunk.retrieved, tail=min(chunk.tail, left))
    return head, tail


NOTHING = Chunk()


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
    """Answers verify requests, one per session at a time."""

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
        self._deliver: dict[int, Deliver] = {}  # by session that waits for an answer
        self._queue: dict[int, VerifyRequest] = {}  # requests without a slot, by session, the oldest first
        self._running: dict[int, VerifyRequest] = {}  # requests with a slot
        self._ready: dict[int, VerifyRequest] = {}  # requests that can be computed, least recently served first
        self._followers: list[VerifyRequest] = []  # requests that wait for another request's prefix
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

    def add(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Add a request; `deliver` is called with the answer, unless the session is dropped first."""
        session = request.session
        slot = self._slots.slot(session)
        held = self._runner.cached(slot) if slot is not None else NO_IDS
        if request.position > len(held):
            deliver(MissingPrefix(len(held)))
            return
        request.ids = np.concatenate((held[: request.position], request.prefix)) if request.position else request.prefix
        self._deliver[session] = deliver
        self._queue[session] = request
        self._scheduler.on_request(request)
        if slot is not None:
            self._claim(request)  # now, so that its slot is not given to an older request

    def drop(self, session: int) -> None:
        """Remove the session and its waiting request."""
        for requests in (self._queue, self._running, self._ready):
            requests.pop(session, None)
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

    def _compute(self, batch: ScheduledBatch[VerifyRequest]) -> None:
        # llama.cpp computes adjacent streams together
        work = batch.slices if len(batch.slices) == 1 else sorted(batch.slices, key=lambda piece: piece.request.slot)
        rows = []
        for request, tokens, outputs in work:
            ids = request.ids[request.computed : request.computed + tokens]
            if outputs > 1:
                ids = np.concatenate((ids, request.remaining.ids[: outputs - 1]))
            rows.append(SeqRows(request.slot, ids, outputs))
        began = perf_counter()
        try:
            logits = self._decode(work[0].request.remaining, rows)
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
                self._judge(request, views, outputs - 1, seconds)
            else:
                request.computed += tokens
                self._requeue(request)
        self._scheduler.on_batch(batch, seconds, waiting - len(self._running))

    def _decode(self, draft: Chunk, rows: list[SeqRows]) -> list[Rows]:
        """Return the logits of the batch; for a single session, lazily, so that only the rows that are read are
        computed."""
        if len(rows) > 1 or rows[0].outputs <= 1 or self._runner.lazy_head is None:
            return list(self._runner.decode_rows(rows))
        single = rows[0]
        reached = survives(cut(draft, single.outputs - 1)[0])
        return [self._runner.decode_lazy(single.ids, seq=single.seq, outputs=single.outputs, reached=reached)]

    def _judge(self, request: VerifyRequest, logits: Rows, drafted: int, seconds: float) -> None:
        """Judge the first `drafted` tokens, which were decoded in `seconds`; then answer, or continue with the
        rest."""
        began, written = perf_counter(), len(request.tokens)
        try:
            needs_pass = judge_pass(request, logits, drafted, self._is_eog)
        except EdgeError as error:
            self._fail(request, error)
            return
        self._runner.rollback(request.computed, request.slot)
        if self._extra_drafts is not None and self._slots.single_session:
            if written:
                tokens = len(request.tokens) - written
                self._extra_drafts.observe(drafted, tokens, seconds + perf_counter() - began)
            if needs_pass and not len(request.remaining):
                request.remaining = self._extra_drafts.draft(request)
        request.seconds += perf_counter() - began
        if needs_pass:
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
        """Put a request at the end of the line."""
        request.arrival = self.prefills
        self._ready.pop(request.session, None)
        self._ready[request.session] = request

    # Slots.

    def _claim_slots(self) -> None:
        """Give slots to waiting requests: the oldest first, of the device with the fewest slots first."""
        refused: set[str] = set()
        waiting = list(self._queue.values())
        if self._scheduler.several_devices():
            waiting.sort(key=lambda request: self._slots.slots_of(request.device))
        for request in waiting:
            device = request.device
            if device in refused:
                continue
            if not self._claim(request) and not (self._preempt(device) and self._claim(request)):
                refused.add(device)  # its other requests get no slot either

    def _claim(self, request: VerifyRequest) -> bool:
        """Give a slot to a request; return False if there is none."""
        session = request.session
        fresh = self._slots.slot(session) is None
        slot = self._slots.claim(session, request.ids, request.tenant)
        if slot is None:
            return False
        del self._queue[session]
        self._running[session] = request
        request.slot, request.passes_in_slot = slot, 0
        self._start(request, fresh)
        return True

    def _preempt(self, device: str) -> bool:
        """Take a slot for `device` from a running request of another device: from the device with the most slots, or,
        if none has more than one, from a request that has run for long enough. That request continues when it gets a
        slot again. Return False if no device has more than its share."""
        slots = self._slots.slots_of(device)
        running = self._running.values()
        candidates = [request for request in running if self._slots.slots_of(request.device) >= slots + 2]
        if candidates:
            needed = max(self._slots.slots_of(request.device) for request in candidates)
            candidates = [request for request in candidates if self._slots.slots_of(request.device) == needed]
        elif not slots:
            candidates = [
                request for request in running if request.passes_in_slot >= max(_MIN_PASSES, len(request.ids) // 8)
            ]
        if not candidates:
            return False
        request = max(candidates, key=lambda request: request.passes_in_slot)
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
        """Sync the slot's cache with the request; a `fresh` slot may copy from other sessions."""
        try:
            if fresh and self._share_prefix(request):
                return
            request.computed = self._runner.sync(request.ids, request.slot)
        except EdgeError as error:
            self._fail(request, error)
            return
        self._ready.pop(request.session, None)
        self._ready[request.session] = request

    def _share_prefix(self, request: VerifyRequest) -> bool:
        """Copy a shared prefix from another session's cache; return True if the request must wait for one that computes
        it.

        This is done only if it saves a chunk of prefill, because a cache is copied whole.
        """
        chunk = self._scheduler.limits.chunk
        ids = request.ids[:-1]  # the last token is decoded in any case
        own = common_prefix(self._runner.cached(request.slot), ids)
        held_by, held = self._slots.longest_prefix(ids, exclude=request.slot)
        needed = max(own, held) + chunk
        for other in self._running.values():
            if (
                other is not request and other.leader is None and _may_share(other, request)
            ):  # a waiting request leads none
                common = common_prefix(other.ids, ids)
                if common >= needed:
                    request.leader, request.common, needed = other, common, common + 1
        if request.leader is not None:
            self._followers.append(request)
            return True
        if held >= own + chunk:
            self._runner.copy_prefix(held_by, request.slot, held)
            self._totals["copied"] += held - own
        return False

    def _release_followers(self) -> None:
        """Start the requests whose leader has computed the shared prefix, or has left."""
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


def _may_share(request: VerifyRequest, other: VerifyRequest) -> bool:
    """Return whether the two may share cached tokens."""
    return request.tenant.cache_salt == other.tenant.cache_salt


_MIN_PASSES = 32  # passes after which a request may lose its slot to a device without one

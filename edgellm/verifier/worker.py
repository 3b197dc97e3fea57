"""The engine of many sessions in a thread of its own, and sessions beside it in the same process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Self

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.kv.saved_prompts import SavedPrompts
from edgellm.engine.native import release_threads
from edgellm.errors import EngineFailed
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest
from edgellm.spec.sampling import GrammarState
from edgellm.spec.types import Verdict
from edgellm.verifier.engine import ModelRunner, VerifierEngine
from edgellm.verifier.in_process import EXTRA_TOKENS
from edgellm.verifier.scheduler import Counters, Job, Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from edgellm.verifier.extra_drafts import ExtraDrafts

_PROMPT = 64  # tokens of a prompt that are read at once, between tokens of other replies: most short prompts
_TOGETHER = 3
"""Further tokens of a verdict while several replies are written: handing each over takes a tenth of a pass."""
_IDLE = 0.01  # seconds without a request after which the thread's team of threads ends: other teams would be slower


class VerifierBackend(ABC):
    """A server of verify requests: an engine in its own thread, or stock servers. Any thread may call methods."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return a heartbeat: a number that grows while requests make progress."""

    @abstractmethod
    def wait_seconds(self) -> float:
        """Return the expected seconds until the waiting requests are answered."""

    @abstractmethod
    def submit(self, request: VerifyRequest) -> Future[Verdict]:
        """Request a verdict behind the whole text; a session always has the same tenant. Return the verdict's future,
        which nobody may cancel. It stays open where the session ends first; any thread may call its callbacks, which
        must not block. VerifierBusy tells when to ask again."""

    @abstractmethod
    def end_session(self, session: int) -> None:
        """End the session, and drop its waiting request."""

    def ready(self) -> bool:
        """Return whether a request would be worked on now."""
        return True

    @abstractmethod
    def start(self) -> None:
        """Begin to answer."""

    @abstractmethod
    def close(self) -> None:
        """Stop answering, and release all resources."""


class VerifierWorker(VerifierBackend):
    """The engine of all sessions in a thread of its own, with its context."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], limits: SchedulerLimits | None = None,
        extra_drafts: ExtraDrafts | None = None, *, ready: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Take over `runner`, which has `slots` sequences; only who computes uses it, and `close` closes it.
        `extra_drafts` as for `VerifierEngine`; `ready` returns whether the runner can decode now."""
        self._runner, self._ready = runner, ready
        self._scheduler = Scheduler(limits or SchedulerLimits())
        self._engine = VerifierEngine(runner, slots, is_eog, self._scheduler, extra_drafts)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._turn = threading.Lock()  # held by the thread that computes
        self._wants_turn = self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)

    @classmethod
    def over(
        cls, model: Model, spec: ContextSpec, limits: SchedulerLimits | None = None,
        saved_prompts: SavedPrompts | None = None,
    ) -> Self:  # fmt: skip
        """Return the worker over `model` with a context by `spec`, whose speculator drafts extra tokens."""
        runner, drafts = Context(model, spec, saved_prompts=saved_prompts), None
        if runner.speculator is not None:
            from edgellm.verifier.extra_drafts import ExtraDrafts

            drafts = ExtraDrafts(runner.speculator, model.is_eog)
        return cls(runner, spec.n_seq, model.is_eog, (limits or SchedulerLimits()).within(runner.n_batch), drafts)

    def ready(self) -> bool:
        return self._ready()

    def start(self) -> None:
        self._thread.start()

    @property
    def counters(self) -> Counters:
        """Return the engine's counters."""
        return self._engine.counters

    @property
    def steps(self) -> int:
        return self._engine.counters.batches

    @property
    def waiting(self) -> int:
        """Return the approximate number of unanswered requests."""
        return len(self._engine) + self._inbox.qsize()

    def wait_seconds(self) -> float:
        return self._scheduler.wait_seconds(self.waiting)

    def submit(self, request: VerifyRequest) -> Future[Verdict]:
        job = self._job(request)
        self._inbox.put(partial(self._engine.add, job))
        if self._closed:  # The thread may no longer read the inbox.
            with suppress(InvalidStateError):
                job.answer.set_exception(_worker_ended())
        return job.answer

    def answer(self, request: VerifyRequest) -> Future[Verdict]:
        """Compute the answer in the calling thread, which spares it two changes of threads, unless and until another
        request has to be computed with it."""
        if self._closed or not self._turn.acquire(blocking=False):
            return self.submit(request)
        try:
            job = self._job(request)
            self._engine.add(job)
            while not (job.answer.done() or self._wants_turn or self._inbox.qsize()):
                self._engine.step()
        finally:
            self._turn.release()
        if not job.answer.done():
            self._inbox.put(lambda: None)  # The worker's thread goes on.
        return job.answer

    def _job(self, request: VerifyRequest) -> Job:
        """Return a request that arrives now, when a batch in progress counts as earlier."""
        return Job(request, request.prefix, arrival=self._engine.counters.prefills)

    def end_session(self, session: int) -> None:
        self._inbox.put(lambda: self._engine.drop(session))

    def fill(self, widths: Sequence[int]) -> None:
        """Pad batches of one session by `Context.fill`."""
        self._inbox.put(lambda: self._runner.fill(widths))

    def use_curve(self, curve: CostCurve) -> None:
        """Choose the chunks of prefills by a measured cost curve."""
        self._scheduler.use_curve(curve)

    def close(self) -> None:
        """Stop the thread after the current batch, and close the context."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        with self._turn:
            self._closed = True
            self._runner.close()

    def _run(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._wants_turn = True
                with self._turn:
                    self._wants_turn = False
                    message()
                    if not self._compute():
                        return
        finally:
            self._closed = True
            self._engine.fail(_worker_ended())

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._inbox.get(timeout=_IDLE)
        except Empty:
            release_threads()
            return self._inbox.get()

    def _compute(self) -> bool:
        """Compute until all requests are answered. Return False to end the thread."""
        patience = 0.0
        while self._process_inbox(perf_counter() + patience):
            if not len(self._engine):
                return True
            began = perf_counter()
            self._engine.step()
            patience = perf_counter() - began
        return False

    def _process_inbox(self, deadline: float) -> bool:
        """Process the inbox, until `deadline` also what comes from sessions that were just answered: computed together,
        their next requests take less time. Return False to end the thread."""
        while True:
            wait = deadline - perf_counter() if self._engine.more_come else 0.0
            try:
                message = self._inbox.get(timeout=max(0.0, wait))
            except Empty:
                self._engine.returning.clear()
                return True
            if message is None:
                return False
            message()


def _worker_ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")


class ColocatedVerifier(Verifier):
    """A verifier that shares the backend of a server in this process. Its sessions have negative numbers, devices'
    sessions positive ones."""

    def __init__(
        self, backend: VerifierBackend, capabilities: Capabilities, grammar: Callable[[str], GrammarState] | None,
        extra: int = 0,
    ) -> None:  # fmt: skip
        """Use `backend`, which the server owns; `grammar` compiles JSON schemas, if possible."""
        self._backend, self._capabilities, self._grammar, self.extra = backend, capabilities, grammar, extra
        self._numbers: Iterator[int] = count(-1, -1)
        self._open: set[int] = set()

    @property
    def crowded(self) -> bool:
        return len(self._open) > 1

    def open(self, state: GenerationState) -> Session:
        number = next(self._numbers)
        self._open.add(number)
        return Session(
            state, self._send, number=number, grammar=self._grammar,
            ready=self._backend.ready, close=partial(self._end, number), reads=self.capabilities.name,
        )  # fmt: skip

    def _end(self, number: int) -> None:
        self._open.discard(number)
        self._backend.end_session(number)

    def _send(self, request: VerifyRequest) -> Future[Verdict]:
        return self._backend.submit(request)


class BatchedVerifier(ColocatedVerifier):
    """A verifier in this process with a context for all of its sessions, whose requests share batches. A session that
    is alone computes in its own thread, except for its prompt."""

    def __init__(self, model: Model, spec: ContextSpec, saved_prompts: SavedPrompts | None = None) -> None:
        """Open a context over `model` by `spec`, for as many sessions as it has sequences."""
        limits = SchedulerLimits(chunk=_PROMPT)
        self._worker = VerifierWorker.over(model, spec, limits, saved_prompts)
        self._speculates = model.speculator is not None
        capabilities = Capabilities(model.name, spec.n_ctx, logprobs=True, penalties=True, grammars=True)
        super().__init__(self._worker, capabilities, model.grammar, EXTRA_TOKENS)
        self._worker.start()

    @property
    def shared(self) -> int:
        return self._worker.counters.shared

    def use_curve(self, curve: CostCurve) -> None:
        self._worker.use_curve(curve)

    def open(self, state: GenerationState) -> Session:
        self._worker.fill(state.terms.widths)
        return super().open(state)

    def _send(self, request: VerifyRequest) -> Future[Verdict]:
        if request.round == 1 or self.crowded:
            request.extra = 0 if request.round == 1 else min(request.extra, _TOGETHER)
            release_threads()
            return super()._send(request)
        request.extra *= self._speculates
        return self._worker.answer(request)

    def close(self) -> None:
        self._worker.close()

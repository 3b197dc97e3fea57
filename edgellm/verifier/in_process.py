"""The verifier engine in this process: without a thread and with one slot, in a thread of its own, or beside its
server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue

import numpy as np

from edgellm.engine import Context, Model, ShouldStop, common_prefix
from edgellm.errors import EdgeError, EngineFailed, ProtocolError
from edgellm.spec.context_pool import ContextPool
from edgellm.spec.guarded_session import settled
from edgellm.spec.protocols import BlockingSession, Verifier, VerifierSession
from edgellm.spec.sampling import likeliest
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Expected, Ids, Verdict
from edgellm.verifier.engine import ModelRunner, VerifierEngine
from edgellm.verifier.fairness import FairScheduler
from edgellm.verifier.requests import Answer, Counters, Deliver, MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import Scheduler, SchedulerLimits


class VerifierWorker:
    """Computes for all sessions together, and closes the context that it computes with."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], limits: SchedulerLimits | None = None
    ) -> None:
        """Take over `runner`, which has `slots` sequences; the worker's thread alone uses it, and `close` closes it."""
        self._runner = runner
        self._scheduler = FairScheduler(limits or SchedulerLimits())
        self._engine = VerifierEngine(runner, slots, is_eog, self._scheduler)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def counters(self) -> Counters:
        """Return what has been done so far."""
        return self._engine.counters

    @property
    def waiting(self) -> int:
        """Return about how many requests are not answered yet."""
        return len(self._engine) + self._inbox.qsize()

    def wait_seconds(self) -> float:
        """Return how long it will take to answer the waiting requests, going by the latest answers."""
        return self._scheduler.rate.seconds(self.waiting)

    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Ask for a verdict; the tenant of a session is always the same. `deliver` is called from the worker's thread,
        unless the session leaves before.

        If the worker has ended, `deliver` may be called twice, with the same error.
        """
        request.arrival = self._engine.prefills  # now: a batch that is being computed goes ahead of this request
        self._inbox.put(lambda: self._engine.add(request, deliver))
        if self._over:  # the thread may no longer read the inbox
            deliver(_ended())

    def leave(self, session: int) -> None:
        """Forget the session, and a request of it that still waits."""
        self._inbox.put(lambda: self._engine.drop(session))

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`: for batches of one session."""
        self._inbox.put(lambda: self._runner.fill(widths, heads))

    def close(self) -> None:
        """End the thread after the batch that it is computing, and close the context."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()

    def _run(self) -> None:
        try:
            while self._hear():
                self._engine.step()
        finally:
            self._over = True
            self._engine.fail(_ended())

    def _hear(self) -> bool:
        """Take in what has arrived, waiting for it where there is nothing to do. Return False when it is time to
        end."""
        while not len(self._engine) or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True


def _ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")


class LocalVerifier(Verifier):
    """A verifier whose sessions have a context each; contexts are reused."""

    def __init__(self, model: Model, contexts: ContextPool, context_length: int) -> None:
        """Use `contexts`, which are over `model` and hold at least `context_length` positions. They are closed with
        this."""
        self._model = model
        self._contexts = contexts
        self._context_length = context_length

    @property
    def name(self) -> str:
        """See `Verifier.name`."""
        return self._model.name

    @property
    def context_length(self) -> int:
        """See `Verifier.context_length`."""
        return self._context_length

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`."""
        return True

    @property
    def shared(self) -> int:
        """See `Verifier.shared`."""
        return self._contexts.shared

    def open(self, state: GenerationState) -> LocalSession:
        """See `Verifier.open`. It never fails: the model is here."""
        return LocalSession(self._model, self._contexts, state)

    def close(self) -> None:
        """See `Verifier.close`."""
        self._contexts.close()


class LocalSession(BlockingSession):
    """One reply's state: a context whose cache follows the reply."""

    def __init__(self, model: Model, contexts: ContextPool, state: GenerationState) -> None:
        self._contexts, self._state = contexts, state
        self._context: Context | None = contexts.take()
        self._context.heed(state.stopped)
        self._context.fill(*state.filling)
        self._engine = VerifierEngine(self._context, 1, model.is_eog, Scheduler(WHOLE))

    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return the verdict: one pass over what the cache lacks of `prefix` and over `chunk`, then at most `extra`
        single tokens."""
        if self._context is None:
            raise RuntimeError("this session is closed")
        state = self._state
        request = VerifyRequest(0, state.sampling, 0, prefix, chunk, extra, state.logprobs)
        try:
            if state.suggestions is not None and state.suggestions.wants_expected:
                foretell(self._context, prefix, self._context.sync(prefix), state.suggestions.expect)
            answer = self._engine.answer(request)
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._engine.drop(request.session)
            self._context.clear()
            raise
        if isinstance(answer, EdgeError):
            raise answer
        if isinstance(answer, MissingPrefix):
            raise ProtocolError("The verifier lacks what it was given.", "Report this.")
        return answer

    def close(self) -> None:
        """See `VerifierSession.close`."""
        if self._context is not None:
            self._context.heed(None)
            self._contexts.give(self._context)
            self._context = None


def foretell(context: Context, prefix: Ids, known: int, foretold: Callable[[Expected], None]) -> None:
    """Decode `prefix` from place `known` on, all but its last token, and report what the model expects behind each.

    It takes the logits of every position: in slices, because they take more memory than all else.
    """
    end = len(prefix) - 1
    for start in range(known, end, SLICE):
        ids = prefix[start : min(start + SLICE, end)]
        foretold(likeliest(context.decode(ids, outputs=len(ids)), EXPECTED, start))


_ANY = 2**30
WHOLE = SchedulerLimits(rows=_ANY, chunk=_ANY, alone=_ANY)
"""Everything in one pass: there are no other sessions."""
SLICE = 32
"""Rows of logits at once: with a vocabulary of 152,000 tokens these are 19 MB."""
EXPECTED = 4
"""Next tokens that are kept for each position."""


class ColocatedVerifier(Verifier):
    """See `Verifier`. Sessions are numbered below zero, those of devices above."""

    def __init__(self, worker: VerifierWorker, name: str, context_length: int) -> None:
        """Use `worker`; closing it stays the server's job."""
        self._worker, self._name, self._context_length = worker, name, context_length
        self._numbers: Iterator[int] = count(-1, -1)

    @property
    def name(self) -> str:
        """See `Verifier.name`."""
        return self._name

    @property
    def context_length(self) -> int:
        """See `Verifier.context_length`."""
        return self._context_length

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`."""
        return True

    def open(self, state: GenerationState) -> ColocatedSession:
        """See `Verifier.open`."""
        return ColocatedSession(self._worker, next(self._numbers), state)


class ColocatedSession(VerifierSession):
    """One reply's state: the tokens that the worker holds of it, for as long as it has room."""

    def __init__(self, worker: VerifierWorker, number: int, state: GenerationState) -> None:
        self._worker, self._number, self._state = worker, number, state
        self._held = NO_IDS

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> ColocatedPending:
        """See `VerifierSession.submit`."""
        return ColocatedPending(self, prefix, chunk, extra)

    @property
    def stopped(self) -> ShouldStop:
        """Return the check whether the reply was cancelled; the worker learns of it between two batches, when the
        session is closed."""
        return self._state.stopped

    @property
    def held(self) -> Ids:
        """Return the tokens that the worker holds."""
        return self._held

    def hold(self, ids: Ids) -> None:
        """Remember that the worker holds `ids` now."""
        self._held = ids

    def ask(self, prefix: Ids, chunk: Chunk, extra: int, position: int) -> Future[Answer]:
        """Have the worker judge `chunk` behind `prefix`, of which it holds the first `position` tokens."""
        answer: Future[Answer] = Future()

        def deliver(what: Answer) -> None:
            if not answer.done():
                answer.set_result(what)

        sampling, logprobs = self._state.sampling, self._state.logprobs
        request = VerifyRequest(self._number, sampling, position, prefix[position:], chunk, extra, logprobs)
        self._worker.submit(request, deliver)
        return answer

    def close(self) -> None:
        self._worker.leave(self._number)


class ColocatedPending:
    """A verdict on its way through the worker."""

    def __init__(self, session: ColocatedSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._session, self._ask = session, (prefix, chunk, extra)
        self._answer = session.ask(*self._ask, common_prefix(session.held, prefix))

    def done(self) -> bool:
        return self._answer.done()

    def result(self) -> Verdict:
        """See `Pending.result`. A prefix that was evicted meanwhile is sent again.

        Raises:
            EngineFailed: the engine failed, or the worker has ended.
            Stopped: the reply was cancelled.
        """
        prefix, chunk, _ = self._ask
        answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, MissingPrefix):
            self._answer = self._session.ask(*self._ask, answer.position)
            answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, EdgeError):
            self._session.hold(NO_IDS)
            raise answer
        if isinstance(answer, MissingPrefix):
            raise ProtocolError(
                "The verifier evicted the session twice in one request.", "Serve it with more sessions."
            )
        self._session.hold(np.concatenate((prefix, chunk.ids[: answer.accepted], answer.tokens[:-1])))
        return answer

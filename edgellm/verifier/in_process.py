"""Verifiers in this process: an engine with one slot per reply, an engine in a thread of its own, and sessions beside a
server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from weakref import WeakValueDictionary

import numpy as np

from edgellm.engine import Context, Model, ShouldStop, Speculator, common_prefix
from edgellm.engine.gguf.overheads import PREDICTED_ROWS
from edgellm.errors import EdgeError, EngineFailed, ProtocolError
from edgellm.spec.constraint import GrammarState, ReplyGrammar
from edgellm.spec.guarded_session import wait_for_result
from edgellm.spec.protocols import BlockingSession, Verifier, VerifierSession
from edgellm.spec.sampling import WHOLE_ROWS, Choice, likeliest
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Expected, Ids, Verdict
from edgellm.verifier.backend import VerifierBackend
from edgellm.verifier.engine import ModelRunner, VerifierEngine
from edgellm.verifier.extra_drafts import ExtraDrafts
from edgellm.verifier.fairness import FairScheduler
from edgellm.verifier.requests import Answer, Counters, Deliver, MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import Scheduler, SchedulerLimits


class ContextPool:
    """Contexts over one model, one per running reply. A returned context keeps its cache for the next reply."""

    def __init__(self, new_context: Callable[[], Context]) -> None:
        self._new_context = new_context
        self._idle: list[Context] = []
        self._all: list[Context] = []

    def take(self) -> Context:
        """Return the context that was given back last, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            context = self._new_context()
            self._all.append(context)
            return context

    def give(self, context: Context) -> None:
        self._idle.append(context)

    def opened(self) -> int:
        """Return how many contexts there are, in use and idle."""
        return len(self._all)

    @property
    def shared(self) -> int:
        """Return how many decodes of all contexts had fewer threads than a context alone has."""
        return sum(context.shared for context in self._all)

    def close(self) -> None:
        """Close every context, including those still in use."""
        self._idle.clear()
        while self._all:
            self._all.pop().close()


class VerifierWorker(VerifierBackend):
    """Runs the engine for all sessions in a thread of its own, and owns its context."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], limits: SchedulerLimits | None = None,
        extra_drafts: ExtraDrafts | None = None,
    ) -> None:  # fmt: skip
        """Take over `runner`, which has `slots` sequences; only the worker's thread uses it, and `close` closes it.
        `extra_drafts` as for `VerifierEngine`."""
        self._runner = runner
        self._scheduler = FairScheduler(limits or SchedulerLimits())
        self._engine = VerifierEngine(runner, slots, is_eog, self._scheduler, extra_drafts)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def counters(self) -> Counters:
        """Return the counters."""
        return self._engine.counters

    @property
    def steps(self) -> int:
        """See `VerifierBackend.steps`."""
        return self._engine.counters.batches

    @property
    def waiting(self) -> int:
        """Return the approximate number of unanswered requests."""
        return len(self._engine) + self._inbox.qsize()

    def wait_seconds(self) -> float:
        """See `VerifierBackend.wait_seconds`."""
        return self._scheduler.rate.seconds(self.waiting)

    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """See `VerifierBackend.submit`. `deliver` is called from the worker's thread.

        If the worker has ended, `deliver` may be called twice, with the same error.
        """
        request.arrival = self._engine.prefills  # a batch in progress counts as earlier
        self._inbox.put(lambda: self._engine.add(request, deliver))
        if self._closed:  # the thread may no longer read the inbox
            deliver(_worker_ended())

    def end_session(self, session: int) -> None:
        """See `VerifierBackend.end_session`."""
        self._inbox.put(lambda: self._engine.drop(session))

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`: for batches of one session."""
        self._inbox.put(lambda: self._runner.fill(widths, heads))

    def use_curve(self, rows: Sequence[int], seconds: Sequence[float]) -> str:
        """Choose the pieces of prefills by a measured cost curve, see `PrefillPieces`; return the reason. To be called
        before `start`."""
        self._scheduler.pieces.use_curve(rows, seconds)
        return self._scheduler.pieces.current.reason

    def close(self) -> None:
        """Stop the thread after the current batch, and close the context."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._runner.close()

    def _run(self) -> None:
        try:
            while self._process_inbox():
                self._engine.step()
        finally:
            self._closed = True
            self._engine.fail(_worker_ended())

    def _process_inbox(self) -> bool:
        """Process the inbox, waiting for it while there is nothing to compute. Return False to end the thread."""
        while not len(self._engine) or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True


def _worker_ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")


class LocalVerifier(Verifier):
    """A verifier in this process; each session has a context, which is reused."""

    def __init__(self, model: Model, contexts: ContextPool, context_length: int) -> None:
        """Take over `contexts` over `model` with at least `context_length` positions each."""
        self._model = model
        self._contexts = contexts
        self._context_length = context_length
        self._sessions: WeakValueDictionary[GenerationState, LocalSession] = WeakValueDictionary()

    @property
    def name(self) -> str:
        """See `Verifier.name`."""
        return self._model.name

    def opened(self) -> int:
        """Return how many contexts are open, of sessions and idle ones."""
        return self._contexts.opened()

    @property
    def speculator_name(self) -> str:
        """See `Verifier.speculator_name`."""
        return "" if self._model.speculator is None else self._model.speculator.name

    def speculator(self, state: GenerationState) -> Speculator | None:
        """See `Verifier.speculator`."""
        session = self._sessions.get(state)
        return None if session is None else session.speculator

    @property
    def context_length(self) -> int:
        """See `Verifier.context_length`."""
        return self._context_length

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`."""
        return True

    @property
    def applies_penalties(self) -> bool:
        """See `Verifier.applies_penalties`."""
        return True

    @property
    def applies_grammars(self) -> bool:
        """See `Verifier.applies_grammars`."""
        return True

    @property
    def shared(self) -> int:
        """See `Verifier.shared`."""
        return self._contexts.shared

    def open(self, state: GenerationState) -> LocalSession:
        """See `Verifier.open`. It never fails: the model is here."""
        session = self._sessions[state] = LocalSession(self._model, self._contexts, state)
        return session

    def close(self) -> None:
        """See `Verifier.close`."""
        self._contexts.close()


class LocalSession(BlockingSession):
    """A session with a context whose cache follows the reply."""

    def __init__(self, model: Model, contexts: ContextPool, state: GenerationState) -> None:
        self._contexts, self._state = contexts, state
        self._context: Context | None = contexts.take()
        self._progress = state.prompt_progress(model.name)
        self._context.set_cancel(state.should_stop, self._progress)
        self._context.fill(*state.filling)
        self._engine = VerifierEngine(self._context, 1, model.is_eog, Scheduler(ONE_PASS))
        self._grammar = ReplyGrammar.of(state.sampling.constraint, model.grammar)

    @property
    def speculator(self) -> Speculator | None:
        """Return what drafts from the states of the session's context; None without it."""
        return None if self._context is None else self._context.speculator

    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return the verdict: one pass over the uncached tokens of `prefix` and over `chunk`, then at most `extra`
        single tokens."""
        if self._context is None:
            raise RuntimeError("this session is closed")
        state = self._state
        request = VerifyRequest(0, state.sampling, 0, prefix, chunk, extra, state.logprobs, grammar=self._grammar)
        try:
            if state.suggestions is not None and state.suggestions.wants_expected:
                known = self._context.sync(prefix)
                report_expected(self._context, prefix, known, state.suggestions.expect, self._progress)
            answer = self._engine.answer(request)
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._engine.drop(request.session)
            self._context.clear()
            raise
        if isinstance(answer, EdgeError):
            raise answer
        if isinstance(answer, MissingPrefix):
            raise ProtocolError("The verifier lost tokens that it was sent.", "Report this.")
        return answer

    def close(self) -> None:
        """See `VerifierSession.close`."""
        if self._context is not None:
            self._context.set_cancel(None)
            self._contexts.give(self._context)
            self._context = None


def report_expected(
    context: Context, prefix: Ids, known: int, report: Callable[[Expected], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Decode `prefix` from place `known` on, except for its last token, and `report` the model's predictions after
    each. Where that takes several of the context's batches, call `progress` as decodes do.

    The logits of all positions take much memory, so they are computed in slices.
    """
    end = len(prefix) - 1
    for start in range(known, end, PREDICTED_ROWS):
        if progress is not None and end - known > context.n_batch:
            progress(start - known, end - known)
        ids = prefix[start : min(start + PREDICTED_ROWS, end)]
        report(likeliest(context.decode(ids, outputs=len(ids)), TOP_K, start))


_UNLIMITED = 2**30
ONE_PASS = SchedulerLimits(rows=_UNLIMITED, chunk=_UNLIMITED, solo_chunk=_UNLIMITED)
"""Everything in one pass: there are no other sessions."""
TOP_K = 4
"""Predictions kept for each position."""


class ColocatedVerifier(Verifier):
    """A verifier that shares the backend of a server in this process. Its sessions have negative numbers, those of
    devices positive ones."""

    def __init__(
        self, backend: VerifierBackend, name: str, context_length: int, grammar: Callable[[str], GrammarState] | None,
        *, logprobs: bool = True, penalties: bool = True, choice: Choice = WHOLE_ROWS,
    ) -> None:  # fmt: skip
        """Use `backend`, which the server owns; `grammar` returns the grammar of a JSON schema, None: there are none.
        `logprobs` and `penalties` say what verdicts can have, and `choice` from what they choose."""
        self._backend, self._name, self._context_length, self._choice = backend, name, context_length, choice
        self._grammar, self._logprobs, self._penalties = grammar, logprobs, penalties
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
        return self._logprobs

    @property
    def applies_penalties(self) -> bool:
        """See `Verifier.applies_penalties`."""
        return self._penalties

    @property
    def applies_grammars(self) -> bool:
        """See `Verifier.applies_grammars`."""
        return self._grammar is not None

    @property
    def choice(self) -> Choice:
        """See `Verifier.choice`."""
        return self._choice

    def open(self, state: GenerationState) -> ColocatedSession:
        """See `Verifier.open`."""
        grammar = ReplyGrammar.of(state.sampling.constraint, self._grammar)
        return ColocatedSession(self._backend, next(self._numbers), state, grammar)


class ColocatedSession(VerifierSession):
    """A session that tracks which tokens the backend holds."""

    def __init__(
        self, backend: VerifierBackend, number: int, state: GenerationState, grammar: ReplyGrammar | None
    ) -> None:
        self._backend, self._number, self._state, self._grammar = backend, number, state, grammar
        self._held = NO_IDS

    def ready(self) -> bool:
        """See `VerifierSession.ready`."""
        return self._backend.ready()

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> ColocatedPending:
        """See `VerifierSession.submit`."""
        return ColocatedPending(self, prefix, chunk, extra)

    @property
    def should_stop(self) -> ShouldStop:
        """Return the reply's cancellation check; the backend sees a cancellation when the session is closed."""
        return self._state.should_stop

    @property
    def held(self) -> Ids:
        """Return the tokens held by the backend."""
        return self._held

    def set_held(self, ids: Ids) -> None:
        """Record that the backend holds `ids`."""
        self._held = ids

    def request_verdict(self, prefix: Ids, chunk: Chunk, extra: int, position: int) -> Future[Answer]:
        """Request a verdict on `chunk` after `prefix`, whose first `position` tokens the backend holds."""
        answer: Future[Answer] = Future()

        def deliver(result: Answer) -> None:
            if not answer.done():
                answer.set_result(result)

        sampling, logprobs = self._state.sampling, self._state.logprobs
        request = VerifyRequest(
            self._number, sampling, position, prefix[position:], chunk, extra, logprobs, grammar=self._grammar
        )
        self._backend.submit(request, deliver)
        return answer

    def close(self) -> None:
        self._backend.end_session(self._number)


class ColocatedPending:
    """A verdict that the backend is asked for."""

    def __init__(self, session: ColocatedSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._session, self._request = session, (prefix, chunk, extra)
        self._answer = session.request_verdict(*self._request, common_prefix(session.held, prefix))

    def done(self) -> bool:
        return self._answer.done()

    def result(self) -> Verdict:
        """See `Pending.result`. If the prefix was evicted meanwhile, it is sent again.

        Raises:
            EngineFailed: the engine failed, or the worker has ended.
            Stopped: the reply was cancelled.
        """
        prefix, chunk, _ = self._request
        answer = wait_for_result(self._answer, self._session.should_stop)
        if isinstance(answer, MissingPrefix):
            self._answer = self._session.request_verdict(*self._request, answer.position)
            answer = wait_for_result(self._answer, self._session.should_stop)
        if isinstance(answer, EdgeError):
            self._session.set_held(NO_IDS)
            raise answer
        if isinstance(answer, MissingPrefix):
            raise ProtocolError(
                "The verifier evicted this session twice within one request.", "Start the verifier with more sessions."
            )
        self._session.set_held(np.concatenate((prefix, chunk.ids[: answer.accepted], answer.tokens[:-1])))
        return answer

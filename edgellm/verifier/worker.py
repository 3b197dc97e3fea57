"""The engine of many sessions in a thread of its own, and sessions beside it in the same process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue

from edgellm.errors import EngineFailed, ProtocolError
from edgellm.spec.constraint import GrammarState
from edgellm.spec.protocols import Capabilities, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Verdict
from edgellm.spec.verifier import Session, VerifyRequest
from edgellm.verifier.engine import ExtraDrafter, ModelRunner, VerifierEngine
from edgellm.verifier.judgement import Answer, Counters, Deliver, MissingPrefix
from edgellm.verifier.scheduler import Scheduler, SchedulerLimits


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
    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Request a verdict; a session always has the same tenant. `deliver` is called with the answer from any thread,
        and must not block, unless the session ends first. VerifierBusy tells when to ask again."""

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
        extra_drafts: ExtraDrafter | None = None,
    ) -> None:  # fmt: skip
        """Take over `runner`, which has `slots` sequences; only the worker's thread uses it, and `close` closes it.
        `extra_drafts` as for `VerifierEngine`."""
        self._runner = runner
        self._scheduler = Scheduler(limits or SchedulerLimits())
        self._engine = VerifierEngine(runner, slots, is_eog, self._scheduler, extra_drafts)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-verifier", daemon=True)

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

    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Request a verdict. If the worker has ended, `deliver` may be called twice, with the same error."""
        arrival = self._engine.counters.prefills  # A batch in progress counts as earlier.
        self._inbox.put(lambda: self._engine.add(request, deliver, arrival))
        if self._closed:  # The thread may no longer read the inbox.
            deliver(_worker_ended())

    def end_session(self, session: int) -> None:
        self._inbox.put(lambda: self._engine.drop(session))

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """Pad batches of one session by `Context.fill`."""
        self._inbox.put(lambda: self._runner.fill(widths, heads))

    def use_curve(self, rows: Sequence[int], seconds: Sequence[float]) -> str:
        """Choose the chunks of prefills by a measured cost curve before `start`; return the reason."""
        return self._scheduler.use_curve(rows, seconds)

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


class ColocatedVerifier(Verifier):
    """A verifier that shares the backend of a server in this process. Its sessions have negative numbers, devices'
    sessions positive ones."""

    def __init__(
        self, backend: VerifierBackend, capabilities: Capabilities, grammar: Callable[[str], GrammarState] | None
    ) -> None:
        """Use `backend`, which the server owns; `grammar` compiles JSON schemas, if possible."""
        self._backend, self._capabilities, self._grammar = backend, capabilities, grammar
        self._numbers: Iterator[int] = count(-1, -1)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def open(self, state: GenerationState) -> Session:
        number = next(self._numbers)
        return Session(
            state, self._send, number=number, grammar=self._grammar,
            ready=self._backend.ready, close=partial(self._backend.end_session, number), reads=self._capabilities.name,
        )  # fmt: skip

    def _send(self, request: VerifyRequest) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        future.set_running_or_notify_cancel()
        self._backend.submit(request, partial(settle, future))
        return future


def settle(future: Future[Verdict], answer: Answer) -> None:
    """Set an engine's verdict or error as the result of `future`."""
    if future.done():  # An engine that ends answers all open requests.
        return
    if isinstance(answer, Verdict):
        future.set_result(answer)
    elif isinstance(answer, MissingPrefix):
        future.set_exception(ProtocolError("The verifier lost tokens that it was sent.", "Report this."))
    else:
        future.set_exception(answer)

"""A verifier engine in a thread of its own, taking requests from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from edgellm.errors import EngineFailed
from edgellm.verifier.engine import ModelRunner, VerifierEngine
from edgellm.verifier.fairness import FairScheduler
from edgellm.verifier.requests import Counters, Deliver, VerifyRequest
from edgellm.verifier.scheduler import SchedulerLimits


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

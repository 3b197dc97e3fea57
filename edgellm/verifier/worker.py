"""A verifier engine in a thread of its own, which takes requests from any thread."""

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
    """Computes for all sessions together. Closes what it computes with."""

    def __init__(
        self, runner: ModelRunner, slots: int, is_eog: Callable[[int], bool], limits: SchedulerLimits | None = None
    ) -> None:
        """`runner` has `slots` sequences; it is used by the worker's thread alone and closed with it."""
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
        """What has been done so far."""
        return self._engine.counters

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet, about."""
        return len(self._engine) + self._inbox.qsize()

    def wait_seconds(self) -> float:
        """Return how long it will take to answer what waits now, going by the answers of late."""
        return self._scheduler.rate.seconds(self.waiting)

    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Ask for a verdict; the tenant of a session is always the same. `deliver` is called from the worker's thread,
        unless the session leaves before.

        Where the worker has ended it may be called twice, with the same error.
        """
        request.arrival = self._engine.prefills  # now: one that is being computed goes ahead of this request
        self._inbox.put(lambda: self._engine.add(request, deliver))
        if self._over:  # perhaps nobody hears it any more
            deliver(_ended())

    def leave(self, session: int) -> None:
        """The session is over; a request of it that still waits is forgotten."""
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
        """Take in what has arrived, waiting for it where there is nothing to do. False: it is time to go."""
        while not len(self._engine) or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
        return True


def _ended() -> EngineFailed:
    return EngineFailed("The verifier's worker has ended.", "Start the verifier again.")

"""A verifier that is being served, asked from within its own process: its batches hold these requests too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count

import numpy as np

from edgellm.engine import common_prefix
from edgellm.errors import EdgeError, ProtocolError
from edgellm.spec.futures import settled
from edgellm.spec.types import NO_IDS, Chunk, Ids, Sampling, Verdict
from edgellm.verifier.requests import Answer, MissingPrefix, VerifyRequest
from edgellm.verifier.worker import VerifierWorker


class InsideVerifier:
    """See `Verifier` and `Tells`. Sessions are numbered below zero, those of devices above."""

    tells = True

    def __init__(self, worker: VerifierWorker, name: str, context_length: int) -> None:
        """The worker stays the server's to close."""
        self.name, self.context_length = name, context_length
        self._worker = worker
        self._numbers: Iterator[int] = count(-1, -1)

    def open(self, sampling: Sampling, *, logprobs: int | None = None) -> InsideSession:
        """A session for one reply."""
        return InsideSession(self._worker, next(self._numbers), sampling, logprobs)

    def close(self) -> None:
        """The verifier is the server's."""


class InsideSession:
    """One reply's state: what the worker holds of it, for as long as it has room."""

    def __init__(self, worker: VerifierWorker, number: int, sampling: Sampling, logprobs: int | None = None) -> None:
        self._worker, self._number, self._sampling, self._logprobs = worker, number, sampling, logprobs
        self.held = NO_IDS
        self.stopped: Callable[[], bool] | None = None

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """See `Heeds`. The worker hears of it between two batches, when the session is closed."""
        self.stopped = stopped

    def ready(self) -> bool:
        return True

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> InsidePending:
        """See `VerifierSession.submit`."""
        return InsidePending(self, prefix, chunk, extra)

    def ask(self, prefix: Ids, chunk: Chunk, extra: int, position: int) -> Future[Answer]:
        """Have the worker judge `chunk` behind `prefix`, of which it holds the first `position` tokens."""
        answer: Future[Answer] = Future()

        def deliver(what: Answer) -> None:
            if not answer.done():
                answer.set_result(what)

        request = VerifyRequest(self._number, self._sampling, position, prefix[position:], chunk, extra, self._logprobs)
        self._worker.submit(request, deliver)
        return answer

    def close(self) -> None:
        self._worker.leave(self._number)


class InsidePending:
    """A verdict on its way through the worker."""

    def __init__(self, session: InsideSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._session, self._ask = session, (prefix, chunk, extra)
        self._answer = session.ask(*self._ask, common_prefix(session.held, prefix))

    def done(self) -> bool:
        return self._answer.done()

    def result(self) -> Verdict:
        """See `Pending.result`. A prefix that was evicted meanwhile is sent again.

        Raises:
            EngineFailed: the engine failed, or the worker has ended.
            Stopped: nobody wants it any more.
        """
        prefix, chunk, _ = self._ask
        answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, MissingPrefix):
            self._answer = self._session.ask(*self._ask, answer.position)
            answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, EdgeError):
            self._session.held = NO_IDS
            raise answer
        if isinstance(answer, MissingPrefix):
            raise ProtocolError(
                "The verifier evicted the session twice in one request.", "Serve it with more sessions."
            )
        self._session.held = np.concatenate((prefix, chunk.ids[: answer.accepted], answer.tokens[:-1]))
        return answer

"""A verifier that is being served, asked from within its own process: its batches contain these requests too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count

import numpy as np

from edgellm.engine import ShouldStop, common_prefix
from edgellm.errors import EdgeError, ProtocolError
from edgellm.spec.futures import settled
from edgellm.spec.protocols import Verifier, VerifierSession
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Ids, Verdict
from edgellm.verifier.requests import Answer, MissingPrefix, VerifyRequest
from edgellm.verifier.worker import VerifierWorker


class InsideVerifier(Verifier):
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

    def open(self, state: GenerationState) -> InsideSession:
        """See `Verifier.open`."""
        return InsideSession(self._worker, next(self._numbers), state)


class InsideSession(VerifierSession):
    """One reply's state: the tokens that the worker holds of it, for as long as it has room."""

    def __init__(self, worker: VerifierWorker, number: int, state: GenerationState) -> None:
        self._worker, self._number, self._state = worker, number, state
        self._held = NO_IDS

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> InsidePending:
        """See `VerifierSession.submit`."""
        return InsidePending(self, prefix, chunk, extra)

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

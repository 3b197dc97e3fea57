"""A verifier that is being served, asked from within its own process: its batches hold these requests too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count

import numpy as np

from edgellm.errors import EdgeError, ProtocolError
from edgellm.serve.batcher import Batcher
from edgellm.serve.jobs import Answer, Missing
from edgellm.serve.sessions import common_prefix
from edgellm.serve.wire import Ask
from edgellm.spec.records import NO_IDS, Chunk, Ids, Sampling, Verdict
from edgellm.spec.waiting import settled


class InsideVerifier:
    """See `Verifier`. Sessions are numbered below zero, those of devices above."""

    def __init__(self, batcher: Batcher, name: str, context_length: int) -> None:
        """The batcher stays the server's to close."""
        self.name, self.context_length = name, context_length
        self._batcher = batcher
        self._numbers: Iterator[int] = count(-1, -1)

    def open(self, sampling: Sampling) -> InsideSession:
        """A session for one reply."""
        return InsideSession(self._batcher, next(self._numbers), sampling)

    def close(self) -> None:
        """The verifier is the server's."""


class InsideSession:
    """One reply's state: what the batcher holds of it, for as long as it has room."""

    def __init__(self, batcher: Batcher, number: int, sampling: Sampling) -> None:
        self._batcher, self._number, self._sampling = batcher, number, sampling
        self._round = 0
        self.held = NO_IDS
        self.stopped: Callable[[], bool] | None = None

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """See `Heeds`. The worker hears of it between two batches, when the session is closed."""
        self.stopped = stopped

    def ready(self) -> bool:
        return True

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> InsidePending:
        """See `VerifierSession.submit`."""
        self._round += 1
        return InsidePending(self, Ask(self._round, 0, prefix, chunk, extra))

    def ask(self, ask: Ask, position: int) -> Future[Answer]:
        """Has the worker answer `ask`, whose prefix is all of it, where it holds the first `position` tokens."""
        answer: Future[Answer] = Future()

        def deliver(what: Answer) -> None:
            if not answer.done():
                answer.set_result(what)

        known = Ask(ask.round, position, ask.prefix[position:], ask.chunk, ask.extra)
        self._batcher.submit(self._number, self._sampling, known, deliver)
        return answer

    def close(self) -> None:
        self._batcher.leave(self._number)


class InsidePending:
    """A verdict on its way through the batcher."""

    def __init__(self, session: InsideSession, ask: Ask) -> None:
        self._session, self._ask = session, ask
        self._answer = session.ask(ask, common_prefix(session.held, ask.prefix))

    def done(self) -> bool:
        return self._answer.done()

    def result(self) -> Verdict:
        """See `Pending.result`. A prefix that was evicted meanwhile is sent again.

        Raises:
            EngineFailed: the engine failed, or the worker has ended.
            Stopped: nobody wants it any more.
        """
        answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, Missing):
            self._answer = self._session.ask(self._ask, answer.position)
            answer = settled(self._answer, self._session.stopped)
        if isinstance(answer, EdgeError):
            self._session.held = NO_IDS
            raise answer
        if isinstance(answer, Missing):
            raise ProtocolError("The verifier forgets faster than it is told.", "Serve it with more sessions.")
        ask = self._ask
        self._session.held = np.concatenate((ask.prefix, ask.chunk.ids[: answer.accepted], answer.tokens[:-1]))
        return answer

"""The verifier engine without a thread and with one slot: a bigger model beside the draft model, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.engine import Context, Model
from edgellm.errors import EdgeError, ProtocolError
from edgellm.spec.context_pool import ContextPool
from edgellm.spec.draft_length import NOT_FILLED
from edgellm.spec.sampling import likeliest
from edgellm.spec.types import Chunk, Expected, Ids, Sampling, Verdict
from edgellm.verifier.engine import VerifierEngine
from edgellm.verifier.requests import MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import Scheduler, SchedulerLimits


class LocalVerifier:
    """Each session has a context of its own; contexts are used again."""

    def __init__(self, model: Model, contexts: ContextPool, context_length: int) -> None:
        """`contexts` are over `model`, and hold `context_length` positions or more. They are closed with this."""
        self._model = model
        self._contexts = contexts
        self._context_length = context_length
        self.filling = NOT_FILLED
        """Of sessions from now on; see `Context.fill`."""

    @property
    def shared(self) -> int:
        """Decodes that shared the cores with others; what they took is not what a decode alone takes."""
        return self._contexts.shared

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def tells(self) -> bool:
        """See `Tells`."""
        return True

    @property
    def context_length(self) -> int:
        return self._context_length

    def open(
        self,
        sampling: Sampling,
        foretold: Callable[[Expected], None] | None = None,
        logprobs: int | None = None,
    ) -> LocalSession:
        """A session for one reply. It never fails: the model is here.

        `foretold` hears what the model expects behind the positions of the prompt, as they are computed. Verdicts
        bring the `logprobs` of their tokens, and of so many others, where a number is given.
        """
        session = LocalSession(self._model, self._contexts, sampling, foretold, logprobs)
        session.fill(*self.filling)
        return session

    def close(self) -> None:
        self._contexts.close()


class LocalSession:
    """One reply's state: a context whose cache follows the reply."""

    def __init__(
        self,
        model: Model,
        contexts: ContextPool,
        sampling: Sampling,
        foretold: Callable[[Expected], None] | None = None,
        logprobs: int | None = None,
    ) -> None:
        self._contexts = contexts
        self._context: Context | None = contexts.take()
        self._engine = VerifierEngine(self._context, 1, model.is_eog, Scheduler(WHOLE))
        self._sampling = sampling
        self._foretold, self._logprobs = foretold, logprobs

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`."""
        if self._context is not None:
            self._context.fill(widths, heads)

    def ready(self) -> bool:
        return True

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> LocalPending:
        """Nothing is computed before the verdict is asked for."""
        return LocalPending(self, prefix, chunk, extra)

    def verify(self, prefix: Ids, chunk: Chunk, extra: int) -> Verdict:
        """Return the verdict: one pass over what the cache lacks of `prefix` and over `chunk`, then `extra` single
        tokens at most."""
        if self._context is None:
            raise RuntimeError("this session is closed")
        request = VerifyRequest(0, self._sampling, 0, prefix, chunk, extra, self._logprobs)
        try:
            if self._foretold is not None:
                foretell(self._context, prefix, self._context.sync(prefix), self._foretold)
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

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """See `Heeds`."""
        if self._context is not None:
            self._context.heed(stopped)

    def close(self) -> None:
        if self._context is not None:
            self.heed(None)
            self._contexts.give(self._context)
            self._context = None


class LocalPending:
    """A verdict that is computed when it is asked for, once."""

    def __init__(self, session: LocalSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._ask = (prefix, chunk, extra)
        self._session = session
        self._verdict: Verdict | None = None

    def done(self) -> bool:
        return True

    def result(self) -> Verdict:
        if self._verdict is None:
            self._verdict = self._session.verify(*self._ask)
        return self._verdict


def foretell(context: Context, prefix: Ids, known: int, foretold: Callable[[Expected], None]) -> None:
    """Decode `prefix` from place `known` on, all but its last token, and tell what the model expects behind each.

    It takes the logits of every position: in slices, because they take more memory than all else.
    """
    end = len(prefix) - 1
    for start in range(known, end, SLICE):
        ids = prefix[start : min(start + SLICE, end)]
        foretold(likeliest(context.decode(ids, outputs=len(ids)), EXPECTED, start))


_ANY = 2**30
WHOLE = SchedulerLimits(rows=_ANY, chunk=_ANY, alone=_ANY)
"""Everything in one pass: nobody else waits."""
SLICE = 32
"""Rows of logits at once: with a vocabulary of 152,000 tokens these are 19 MB."""
EXPECTED = 4
"""Next tokens that are kept for each position."""

"""The verifier engine without a thread and with one slot: a bigger model beside the draft model, in one process."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engine import Context, Model
from edgellm.errors import EdgeError, ProtocolError
from edgellm.spec.context_pool import ContextPool
from edgellm.spec.protocols import BlockingSession, Verifier
from edgellm.spec.sampling import likeliest
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Expected, Ids, Verdict
from edgellm.verifier.engine import VerifierEngine
from edgellm.verifier.requests import MissingPrefix, VerifyRequest
from edgellm.verifier.scheduler import Scheduler, SchedulerLimits


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

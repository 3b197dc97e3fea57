"""A verifier in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from edgellm.engine import Context, Model, Rows, known
from edgellm.spec.curve import NOT_FILLED
from edgellm.spec.pool import ContextPool
from edgellm.spec.records import NO_IDS, Chunk, Expected, Ids, Logprobs, Sampling, Verdict
from edgellm.spec.sampling import likeliest, logprobs
from edgellm.spec.verify import judge, plausible


class LocalVerifier:
    """A bigger model beside the draft model. Each session has a context of its own; contexts are used again."""

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
        self._model = model
        self._contexts = contexts
        self._context: Context | None = contexts.take()
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
        """One pass over what the cache lacks of `prefix` and over `chunk`, then `extra` single tokens at most."""
        started = perf_counter()
        context = self._context
        if context is None:
            raise RuntimeError("this session is closed")
        try:
            unseen = prefix[context.sync(prefix) :]
            if self._foretold is not None and len(unseen) > 1:
                unseen = foretell(context, prefix, len(prefix) - len(unseen), self._foretold)
            ids = np.concatenate((unseen, chunk.ids)) if len(chunk) else unseen
            rows = context.decode_late(ids, outputs=len(chunk) + 1, reached=survives(chunk))
            accepted, answer = judge(chunk, rows, self._sampling, position=len(prefix))
            likely = plausible(chunk, rows, accepted) if chunk.retrieved else None
            said = self._said(chunk.ids[:accepted], answer, rows)
            tokens = [answer]
            if extra > 0:
                context.rollback(len(prefix) + accepted)
            while len(tokens) <= extra and not self._model.is_eog(tokens[-1]):
                row = context.decode(np.array(tokens[-1:], dtype=np.int32))
                tokens.append(judge(_NOTHING, row, self._sampling, len(prefix) + accepted + len(tokens))[1])
                said += self._said(NO_IDS, tokens[-1], row)
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            context.clear()
            raise
        seconds = perf_counter() - started
        answers = np.array(tokens, dtype=np.int32)
        return Verdict(accepted, answers, seconds, passes=len(tokens), plausible=likely, logprobs=said)

    def _said(self, kept: Ids, answer: int, rows: Rows) -> tuple[Logprobs, ...]:
        """What the model said of the tokens that stand, (n,), and of its own behind them; `rows` begins with theirs."""
        if self._logprobs is None:
            return ()
        return tuple(logprobs(known(rows, len(kept) + 1), np.append(kept, answer), self._logprobs))

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


def survives(chunk: Chunk) -> list[float]:
    """The chance that each of its tokens stands, with all before it, as its drafter saw it; (n,)."""
    drafted = 0 if chunk.retrieved else len(chunk) - chunk.tail
    return [*chunk.confidence[:drafted].cumprod().tolist(), *chunk.confidence[drafted:].tolist()]


_NOTHING = Chunk()
SLICE = 32
"""Rows of logits at once: with a vocabulary of 152,000 tokens these are 19 MB."""
EXPECTED = 4
"""Next tokens that are kept for each position."""


def foretell(context: Context, prefix: Ids, known: int, foretold: Callable[[Expected], None]) -> Ids:
    """Decode `prefix` from place `known` on, all but its last token, and tell what the model expects behind each.
    Return what is left.

    It takes the logits of every position: in slices, because they take more memory than all else.
    """
    end = len(prefix) - 1
    for start in range(known, end, SLICE):
        ids = prefix[start : min(start + SLICE, end)]
        foretold(likeliest(context.decode(ids, outputs=len(ids)), EXPECTED, start))
    return prefix[-1:]

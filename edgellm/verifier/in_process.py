"""The verifier in this process: a context for each reply, computed in the thread of the reply."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter

import numpy as np

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.kv.saved_prompts import SavedPrompts
from edgellm.engine.model import PREDICTED_ROWS
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, settled
from edgellm.spec.sampling import likeliest
from edgellm.spec.types import Expected, Ids, Verdict
from edgellm.spec.verification import Judgement

EXTRA_TOKENS = 7  # `Verifier.extra` where asking again is slow


class LocalVerifier(Verifier):
    """A verifier in this process, whose sessions have a context each. The context of an ended one keeps its cache for
    the next one."""

    def __init__(self, model: Model, spec: ContextSpec, saved_prompts: SavedPrompts | None = None) -> None:
        """Open contexts over `model` by `spec`; `saved_prompts` as for `Context`."""
        self.model, self._spec, self._saved_prompts = model, spec, saved_prompts
        self._idle: list[Context] = []
        self._all: list[Context] = []
        speculator = "" if model.speculator is None else model.speculator.name
        self._capabilities = Capabilities(
            model.name, spec.n_ctx, logprobs=True, penalties=True, grammars=True, speculator=speculator
        )

    @property
    def shared(self) -> int:
        return sum(context.native.shared for context in self._all)

    def open(self, state: GenerationState) -> Session:
        try:
            context = self._idle.pop()
        except IndexError:
            self._all.append(context := Context(self.model, self._spec, saved_prompts=self._saved_prompts))
        context.set_cancel(state.should_stop, state.prompt_progress(self.model.name))
        context.fill(state.terms.widths)
        state.lend(context.speculator)

        def close() -> None:
            context.set_cancel(None)
            self._idle.append(context)

        return Session(state, partial(self._answer, context, state), grammar=self.model.grammar, close=close)

    def _answer(self, context: Context, state: GenerationState, request: VerifyRequest) -> Future[Verdict]:
        """Compute the verdict at once: a pass over the uncached text and the draft, then up to `extra` tokens."""
        job, prefix = Judgement(request, request.prefix), request.prefix
        request.computed = request.cached = context.sync(prefix)
        if state.terms.expect is not None:
            progress = state.prompt_progress(self.model.name)
            report_expected(context, prefix, request.computed, state.terms.expect, progress)
            request.computed = context.sync(prefix)
        needs_pass = True
        while needs_pass:
            began, drafted = perf_counter(), len(job.remaining)
            ids = np.concatenate((job.ids[request.computed :], job.remaining.ids))
            rows = context.decode(ids, outputs=drafted + 1)
            needs_pass = job.judge(rows, drafted, self.model.is_eog)
            context.rollback(request.computed)
            job.seconds += perf_counter() - began
        return settled(job.verdict())

    def close(self) -> None:
        """Close every context, including those still in use."""
        self._idle.clear()
        while self._all:
            self._all.pop().close()


def report_expected(
    context: Context, prefix: Ids, known: int, report: Callable[[Expected], None],
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Decode `prefix` from place `known` on, except for its last token, in slices, as all logits take much memory;
    `report` the model's predictions after each token. For more than one batch, call `progress` as decodes do."""
    end = len(prefix) - 1
    for start in range(known, end, PREDICTED_ROWS):
        if end - known > context.n_batch:
            progress(known, start, end)
        ids = prefix[start : min(start + PREDICTED_ROWS, end)]
        report(likeliest(context.decode(ids, outputs=len(ids)), start))

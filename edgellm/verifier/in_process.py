"""The verifier in this process: a context for each reply, computed in the thread of the reply."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.gguf.memory import PREDICTED_ROWS
from edgellm.engine.kv.saved_prompts import SavedPrompts
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, settled
from edgellm.spec.sampling import likeliest
from edgellm.spec.types import Expected, Ids, Verdict
from edgellm.spec.verification import Judgement

if TYPE_CHECKING:
    from edgellm.engine.speculators.speculator import Speculator

EXTRA_TOKENS = 7  # further tokens of a verdict for a reply without a draft model, where asking again is slow


class LocalVerifier(Verifier):
    """A verifier in this process, whose sessions have a context each. The context of an ended one keeps its cache for
    the next one."""

    def __init__(self, model: Model, spec: ContextSpec, prompt_cache: SavedPrompts | None = None) -> None:
        """Open contexts over `model` by `spec`; `prompt_cache` as for `Context`."""
        self.model, self._spec, self._prompt_cache = model, spec, prompt_cache
        self._idle: list[Context] = []
        self._all: list[Context] = []
        speculator = "" if model.speculator is None else model.speculator.name
        self._capabilities = Capabilities(
            model.name, spec.n_ctx, logprobs=True, penalties=True, grammars=True, speculator=speculator
        )
        self._replies: WeakValueDictionary[GenerationState, _OwnContext] = WeakValueDictionary()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def shared(self) -> int:
        return sum(context.native.shared for context in self._all)

    def take(self) -> Context:
        """Return the context that was given back last, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            self._all.append(context := Context(self.model, self._spec, prompt_cache=self._prompt_cache))
            return context

    def give(self, context: Context) -> None:
        """Take a context back, for the next session."""
        self._idle.append(context)

    def speculator(self, state: GenerationState) -> Speculator | None:
        reply = self._replies.get(state)
        return None if reply is None or reply.context is None else reply.context.speculator

    def open(self, state: GenerationState) -> Session:
        reply = self._replies[state] = _OwnContext(self, state)
        return Session(state, reply.send, grammar=self.model.grammar, close=reply.close)

    def close(self) -> None:
        """Close every context, including those still in use."""
        self._idle.clear()
        while self._all:
            self._all.pop().close()


class _OwnContext:
    """A context whose cache follows one reply."""

    def __init__(self, verifier: LocalVerifier, state: GenerationState) -> None:
        self._verifier, self._expect, self._is_eog = verifier, state.terms.expect, verifier.model.is_eog
        self._progress = state.prompt_progress(verifier.model.name)
        context = verifier.take()
        context.set_cancel(state.should_stop, self._progress)
        context.fill(state.terms.widths)
        self.context: Context | None = context

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        """Compute the verdict at once: a pass over the uncached text and the draft, then up to `extra` tokens."""
        if (context := self.context) is None:
            raise RuntimeError("this session is closed")
        job = Judgement(request, request.prefix)
        request.computed = request.cached = context.sync(request.prefix)
        if self._expect is not None:
            report_expected(context, request.prefix, request.computed, self._expect, self._progress)
            request.computed = context.sync(request.prefix)
        needs_pass = True
        while needs_pass:
            began, drafted = perf_counter(), len(job.remaining)
            ids = np.concatenate((job.ids[request.computed :], job.remaining.ids))
            rows = context.decode(ids, outputs=drafted + 1)
            needs_pass = job.judge(rows, drafted, self._is_eog)
            context.rollback(request.computed)
            job.seconds += perf_counter() - began
        return settled(job.verdict())

    def close(self) -> None:
        """Give the context back."""
        if self.context is not None:
            self.context.set_cancel(None)
            self._verifier.give(self.context)
            self.context = None


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

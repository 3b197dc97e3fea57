"""A verifier with real arithmetic and a given text: each pass is computed in full, and verdicts follow a reply.

So weights may be random: a file of a real model's shape takes as long as the real model, with the acceptance of the
reply.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from edgellm.engine import Context, Model, known
from edgellm.spec.protocols import BlockingSession, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids, Verdict
from edgellm.verifier.engine import survives


class ForcedVerifier(Verifier, BlockingSession):
    """A verifier with the verdicts of a given reply. One session at a time, in one context."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._context = model, context
        self._prompt = 0
        self._reply: tuple[int, ...] = ()

    def says(self, prompt: Ids, reply: tuple[int, ...]) -> None:
        """Write `reply` after `prompt` from now on."""
        self._prompt, self._reply = len(prompt), reply

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def context_length(self) -> int:
        return self._context.n_ctx

    def open(self, state: GenerationState) -> ForcedVerifier:
        self._context.fill(*state.filling)
        return self

    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:  # noqa: ARG002
        """Compute a pass over new tokens, read its logits as `verify_greedy` does, and return the reply's verdict."""
        began = perf_counter()
        unseen = prefix[self._context.sync(prefix) :]
        ids = np.concatenate((unseen, chunk.ids)) if len(chunk) else unseen
        rows = self._context.decode_lazy(ids, outputs=len(chunk) + 1, reached=survives(chunk))
        expected = self._reply[len(prefix) - self._prompt :]
        accepted = 0
        for drafted, token in zip(chunk.ids.tolist(), expected, strict=False):
            if drafted != token:
                break
            accepted += 1
        known(rows, len(rows) if isinstance(rows, np.ndarray) else accepted + 1).argmax(axis=1)
        answer = expected[accepted] if accepted < len(expected) else 0
        return Verdict(accepted, np.array([answer], dtype=np.int32), perf_counter() - began)

    def close(self) -> None: ...

"""A verifier with real arithmetic and a given text: each pass is computed in full, and the verdict is read off a reply.

So weights may be random: a file of a real model's shape times like the real model, and acceptance is that of the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgellm.engine import Context, Model, known
from edgellm.spec.types import Chunk, Ids, Sampling, Verdict
from edgellm.verifier.judging import survives


class ForcedVerifier:
    """Says what `case` says. One session at a time, in one context."""

    def __init__(self, model: Model, context: Context) -> None:
        self.name, self.context_length = model.name, context.n_ctx
        self._context = context
        self._prompt = 0
        self._reply: tuple[int, ...] = ()

    def says(self, prompt: Ids, reply: tuple[int, ...]) -> None:
        """What it writes behind `prompt` from now on."""
        self._prompt, self._reply = len(prompt), reply

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`."""
        self._context.fill(widths, heads)

    def open(self, sampling: Sampling) -> ForcedVerifier:  # noqa: ARG002
        return self

    def ready(self) -> bool:
        return True

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> ForcedPending:  # noqa: ARG002
        return ForcedPending(self, prefix, chunk)

    def verify(self, prefix: Ids, chunk: Chunk) -> Verdict:
        """A pass over what is new; its logits are looked at as `verify_greedy` does."""
        began = perf_counter()
        unseen = prefix[self._context.sync(prefix) :]
        ids = np.concatenate((unseen, chunk.ids)) if len(chunk) else unseen
        rows = self._context.decode_late(ids, outputs=len(chunk) + 1, reached=survives(chunk))
        wanted = self._reply[len(prefix) - self._prompt :]
        accepted = 0
        for drafted, token in zip(chunk.ids.tolist(), wanted, strict=False):
            if drafted != token:
                break
            accepted += 1
        known(rows, len(rows) if isinstance(rows, np.ndarray) else accepted + 1).argmax(axis=1)
        answer = wanted[accepted] if accepted < len(wanted) else 0
        return Verdict(accepted, np.array([answer], dtype=np.int32), perf_counter() - began)

    def close(self) -> None: ...


class ForcedPending:
    """A verdict that is computed when it is asked for."""

    def __init__(self, verifier: ForcedVerifier, prefix: Ids, chunk: Chunk) -> None:
        self._verifier, self._prefix, self._chunk = verifier, prefix, chunk

    def done(self) -> bool:
        return True

    def result(self) -> Verdict:
        return self._verifier.verify(self._prefix, self._chunk)

"""A verifier with real arithmetic and a given text: each pass is computed in full, and verdicts follow a reply.

So weights may be random: a file of a real model's shape takes as long as the real model, with the acceptance of the
reply.
"""

from concurrent.futures import Future
from time import perf_counter

import numpy as np

from edgellm.engine import Context, Model
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, settled
from edgellm.spec.types import Ids, Verdict


class ForcedVerifier(Verifier):
    """A verifier with the verdicts of a given reply. One session at a time, in one context."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._context = model, context
        self._prompt = 0
        self._reply: tuple[int, ...] = ()

    def says(self, prompt: Ids, reply: tuple[int, ...]) -> None:
        """Write `reply` after `prompt` from now on."""
        self._prompt, self._reply = len(prompt), reply

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._model.name, self._context.n_ctx)

    def open(self, state: GenerationState) -> Session:
        self._context.fill(state.terms.widths)
        return Session(state, self._verdict)

    def _verdict(self, request: VerifyRequest) -> Future[Verdict]:
        """Compute a pass over new tokens, read its logits as `verify_greedy` does, and return the reply's verdict."""
        began, prefix, chunk = perf_counter(), request.prefix, request.draft
        unseen = prefix[self._context.sync(prefix) :]
        ids = np.concatenate((unseen, chunk.ids)) if len(chunk) else unseen
        rows = self._context.decode(ids, outputs=len(chunk) + 1)
        expected = self._reply[len(prefix) - self._prompt :]
        accepted = 0
        for drafted, token in zip(chunk.ids.tolist(), expected, strict=False):
            if drafted != token:
                break
            accepted += 1
        rows[: accepted + 1].argmax(axis=1)
        answer = expected[accepted] if accepted < len(expected) else 0
        return settled(Verdict(accepted, np.array([answer], dtype=np.int32), perf_counter() - began))

"""A verifier of your own: greedy verification in a few lines, with the project's engine under it.

python examples/verifier.py
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Verdict
from edgellm.spec.verifier import Capabilities, Session, Verifier, VerifyRequest, settled
from edgellm.storage import resolve

PROMPT = "Where did I leave my mug? It was on the desk, and then Tom took it to the kitchen."


class Greedy(Verifier):
    """One model, one context, one reply at a time."""

    def __init__(self, model: Model, positions: int = 1024) -> None:
        self._model, self._context = model, Context(model, ContextSpec(n_ctx=positions))

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do: no log-probabilities, penalties or JSON schemas."""
        return Capabilities(self._model.name, self._context.n_ctx, can_be_lost=False)

    def open(self, state: GenerationState) -> Session:
        """Return a session for the reply `state`."""
        return Session(state, self._verdict)

    def _verdict(self, request: VerifyRequest) -> Future[Verdict]:
        """Return how many drafted tokens the model would have written itself, and its own next one."""
        unseen = request.prefix[self._context.sync(request.prefix) :]
        drafted = request.draft.ids
        rows = self._context.decode(np.concatenate((unseen, drafted)), outputs=len(drafted) + 1)
        own = rows.argmax(axis=1).astype(np.int32)
        accepted = int(np.cumprod(own[: len(drafted)] == drafted).sum())
        return settled(Verdict(accepted, own[accepted : accepted + 1]))

    def close(self) -> None:
        """Free the memory."""
        self._context.close()


def main() -> None:
    """Write one reply with this verifier and one with the project's own, and compare them."""
    with Model.load(resolve("edgellm-draft")) as draft, Model.load(resolve("edgellm-verifier")) as model:
        verifier = Greedy(model)
        with LLM.of(model, draft, verifier) as pair:
            ours = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
        verifier.close()
    with LLM.open() as pair:
        theirs = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
    print(f"the same text: {ours == theirs}")


if __name__ == "__main__":
    main()

"""A verifier of your own: greedy verification in a few lines, with the project's engine under it.

python examples/verifier.py
"""

from __future__ import annotations

import numpy as np

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.spec.protocols import BlockingSession, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Verdict
from edgellm.storage import resolve

PROMPT = "Where did I leave my mug? It was on the desk, and then Tom took it to the kitchen."


class Greedy(Verifier):
    """One model, one context, one reply at a time."""

    def __init__(self, model: Model, positions: int = 1024) -> None:
        self.name, self.context_length = model.name, positions
        self._context = Context(model, ContextSpec(n_ctx=positions))

    def open(self, state: GenerationState) -> GreedySession:
        """Return a session for the reply `state`."""
        return GreedySession(self._context)

    def close(self) -> None:
        """Free the memory."""
        self._context.close()


class GreedySession(BlockingSession):
    """One reply."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return how many drafted tokens the model would have written itself, and its own next one."""
        unseen = prefix[self._context.sync(prefix) :]
        rows = self._context.decode(np.concatenate((unseen, chunk.ids)), outputs=len(chunk) + 1)
        own = rows.argmax(axis=1).astype(np.int32)
        accepted = int(np.cumprod(own[: len(chunk)] == chunk.ids).sum())
        return Verdict(accepted, own[accepted : accepted + 1])


def main() -> None:
    """Write one reply with this verifier and one with the project's own, and compare them."""
    with Model.load(resolve("edgellm-draft")) as draft, Model.load(resolve("edgellm-verifier")) as model:
        verifier = Greedy(model)
        with LLM(model, draft, verifier) as pair:
            ours = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
        verifier.close()
    with LLM.open("edgellm-draft", "edgellm-verifier") as pair:
        theirs = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
    print(f"the same text: {ours == theirs}")


if __name__ == "__main__":
    main()

"""A verifier of your own: greedy verification in a few lines, with the project's engine under it.

python examples/verifier.py
"""

from typing import Self

import numpy as np

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.spec.protocols import BlockingSession, GenerationState, Verifier
from edgellm.spec.types import Chunk, Verdict
from edgellm.storage.model_files import resolve

PROMPT = "Where did I leave my mug? It was on the desk, and then Tom took it to the kitchen."


class Greedy(Verifier, BlockingSession):
    """One model, one context, one reply at a time, so that it is the reply's session itself."""

    def __init__(self, context: Context) -> None:
        self.name, self.context_length, self._context = context.model.name, context.n_ctx, context

    def open(self, state: GenerationState) -> Self:
        """Return the session of a reply."""
        return self

    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return how many drafted tokens the model would have written itself, and its own next one."""
        drafted = chunk.ids
        unseen = prefix[self._context.sync(prefix) :]
        rows = self._context.decode(np.concatenate((unseen, drafted)), outputs=len(drafted) + 1)
        own = rows.argmax(axis=1).astype(np.int32)
        accepted = int(np.cumprod(own[:-1] == drafted).sum())
        return Verdict(accepted, own[accepted : accepted + 1])


def main() -> None:
    """Write one reply with this verifier and one with the project's own, and compare them."""
    with (
        Model.load(resolve("edgellm-draft")) as draft,
        Model.load(resolve("edgellm-verifier")) as model,
        Context(model, ContextSpec(n_ctx=1024)) as context,
        LLM(model, draft, Greedy(context)) as pair,
    ):
        ours = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
    with LLM.open("edgellm-draft", "edgellm-verifier") as pair:
        theirs = [token.id for token in pair.reply(PROMPT, max_tokens=40)]
    print(f"the same text: {ours == theirs}")


if __name__ == "__main__":
    main()

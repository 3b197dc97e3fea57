"""A verifier of your own: greedy verification in a few lines, with the project's engine under it.

python examples/verifier.py
"""

from concurrent.futures import Future

import numpy as np

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.protocols import GenerationState, Session, Verifier, VerifyRequest, settled
from edgellm.spec.types import Verdict
from edgellm.storage import resolve

PROMPT = "Where did I leave my mug? It was on the desk, and then Tom took it to the kitchen."


class Greedy(Verifier):
    """One model, one context, one reply at a time."""

    def __init__(self, context: Context) -> None:
        self.name, self.context_length, self._context = context.model.name, context.n_ctx, context

    def open(self, state: GenerationState) -> Session:
        """Return the session of a reply, which has its requests answered."""
        return Session(state, self.verify)

    def verify(self, request: VerifyRequest) -> Future[Verdict]:
        """Return how many drafted tokens the model would have written itself, and its own next one."""
        prefix, drafted = request.prefix, request.draft.ids
        unseen = prefix[self._context.sync(prefix) :]
        rows = self._context.decode(np.concatenate((unseen, drafted)), outputs=len(drafted) + 1)
        own = rows.argmax(axis=1).astype(np.int32)
        accepted = int(np.cumprod(own[:-1] == drafted).sum())
        return settled(Verdict(accepted, own[accepted : accepted + 1]))


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

"""A drafter of your own: it drafts what followed the last two tokens when they last stood in the text.

    python examples/drafter.py

Everything it drafts is verified, so the text is the verifier's own, and only the number of passes changes.
"""

import numpy as np

from edgellm import LLM
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.types import Chunk

PROMPT = "Repeat after me: the red bicycle is behind the green shed, and the key is under the blue pot."


class LastTime(Drafter):
    """Copies from the text itself."""

    needs_verdict = True  # No model wrote the copied tokens, so none may stand unverified.

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Return up to `gamma` tokens; none if the last two tokens are new."""
        ids = state.ids
        again = np.flatnonzero((ids[:-2] == ids[-2]) & (ids[1:-1] == ids[-1]))
        return Chunk(ids[again[-1] + 2 :][:gamma].copy(), retrieved=True) if len(again) else Chunk()


def main() -> None:
    """Write one reply with this drafter and one without, and compare them."""
    with LLM.open() as pair:
        plain = pair.reply(PROMPT, max_tokens=40, retrieval="off")
        drafted = pair.reply(PROMPT, max_tokens=40, drafter=LastTime(), gamma=8)
        same = [token.id for token in plain] == [token.id for token in drafted]
        accepted = drafted.summary.accepted
    print(f"the same text: {same}; {accepted} of {drafted.summary.drafted} drafted tokens accepted")


if __name__ == "__main__":
    main()

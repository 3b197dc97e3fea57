"""Drafts of the verifier's speculator: its MTP layer, or an EAGLE-3 head beside it."""

from collections.abc import Callable

from edgellm.engine.speculators.speculator import Speculator
from edgellm.spec.drafters.model import ChunkBuilder
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.sampling import top2
from edgellm.spec.types import NO_CHUNK, Chunk


def draft(
    speculator: Speculator, state: GenerationState, chunk: ChunkBuilder, is_eog: Callable[[int], bool], seq: int = 0
) -> Chunk:
    """Return `chunk`, filled by the speculator up to a token that ends the turn. It is empty where the verifier's
    context has not decoded all of the text in `state` but the last token."""
    logits = speculator.predict(state.ids, seq)
    if logits is None:
        return NO_CHUNK
    while True:
        token = chunk.add(logits, top2(logits))
        if chunk.full() or is_eog(token):
            return chunk.build()
        logits = speculator.follow(token, seq)


class SpeculatorDrafter(Drafter):
    """A drafter with the speculator of a verifier in this process, which must verify every token: the speculator reads
    its states."""

    needs_verdict = True

    def __init__(self, is_eog: Callable[[int], bool]) -> None:
        self._is_eog = is_eog

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk; an empty one before the verifier has read the prompt, and while not even a sure token would
        pay."""
        floors = state.rules.floors()
        if state.speculator is None or (floors and floors[0] >= 1.0):
            return NO_CHUNK
        # A chunk ends where the next token would not pay.
        chunk = ChunkBuilder(state, min(gamma, state.tokens_left), floors=floors[1:])
        return draft(state.speculator, state, chunk, self._is_eog)

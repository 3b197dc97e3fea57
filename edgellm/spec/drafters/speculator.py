"""Drafts of the verifier's speculator: its MTP layer, or an EAGLE-3 head beside it."""

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.engine import Top2, top2
from edgellm.engine.speculators.speculator import Speculator
from edgellm.spec.protocols import Drafter, GenerationState, Verifier
from edgellm.spec.sampling import distribution, draw, penalised
from edgellm.spec.types import Chunk, Ids, Sampling


def draft(
    speculator: Speculator, prefix: Ids, gamma: int, sampling: Sampling, is_eog: Callable[[int], bool],
    floors: Sequence[float], seq: int = 0,
) -> Chunk:  # fmt: skip
    """Return up to `gamma` tokens after `prefix` (n,), of which the verifier's context has all but the last decoded;
    none where it has not.

    The chunk ends at an end-of-generation token, and where the product of its confidences falls below the entry of
    `floors` for the next place.
    """
    logits = speculator.predict(prefix, seq) if gamma > 0 else None
    if logits is None:
        return Chunk()
    ids: list[int] = []
    facts: list[Top2] = []
    alive = 1.0
    while True:
        if sampling.penalties is not None:
            text = np.concatenate((prefix, np.array(ids, dtype=np.int32)))
            logits = penalised(logits, text, sampling.penalties)
        facts.append(top2(logits))
        token = facts[-1].id
        if not sampling.greedy:
            token = draw(distribution(logits, sampling), sampling.seed, len(prefix) + len(ids))
        ids.append(token)
        alive *= facts[-1].p1
        if len(ids) == gamma or is_eog(token) or (len(ids) < len(floors) and alive < floors[len(ids)]):
            confidence = np.array([fact.p1 for fact in facts], np.float32)
            return Chunk(np.array(ids, np.int32), confidence, confidence - np.array([f.p2 for f in facts], np.float32))
        logits = speculator.follow(token, seq)


class SpeculatorDrafter(Drafter):
    """A drafter with the speculator of a verifier in this process, which must verify every token: the speculator reads
    its states."""

    needs_verdict = True

    def __init__(self, verifier: Verifier, is_eog: Callable[[int], bool]) -> None:
        self._verifier, self._is_eog = verifier, is_eog
        self._speculator: Speculator | None = None

    def begin(self, state: GenerationState) -> None:
        """Take the speculator of the open session at the verifier."""
        self._speculator = self._verifier.speculator(state)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk; an empty one before the verifier has read the prompt, and while not even a sure token would
        pay."""
        floors = state.rules.floors()
        if self._speculator is None or (floors and floors[0] >= 1.0):
            return Chunk()
        return draft(self._speculator, state.ids, min(gamma, state.tokens_left), state.sampling, self._is_eog, floors)

    def end(self) -> None:
        """Give the speculator back with the verifier's context."""
        self._speculator = None

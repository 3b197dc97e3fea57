"""Drafts of the verifier's speculator: its MTP layer, or an EAGLE-3 head beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.engine import top2
from edgellm.engine.speculators.speculator import Speculator
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.sampling import distribution, draw, penalised
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Floats, Ids, Sampling

_WEIGHT = 0.2  # weight of the last chunk in the seconds of a token
Floor = Callable[[int], float]
"""The break-even chance of a further token, by the number of drafted tokens."""


def draft(
    speculator: Speculator, prefix: Ids, gamma: int, sampling: Sampling, is_eog: Callable[[int], bool], floor: Floor,
    seq: int = 0,
) -> Chunk:  # fmt: skip
    """Return up to `gamma` tokens after `prefix` (n,), of which the verifier's context has all but the last decoded;
    none where it has not.

    The chunk ends at an end-of-generation token, and where the product of its confidences falls below `floor`.
    """
    logits = speculator.predict(prefix, seq) if gamma > 0 else None
    if logits is None:
        return Chunk()
    ids: list[int] = []
    confidence: list[float] = []
    margin: list[float] = []
    alive = 1.0
    while True:
        if sampling.penalties is not None:
            text = np.concatenate((prefix, np.array(ids, dtype=np.int32)))
            logits = penalised(logits, text, sampling.penalties)
        facts = top2(logits)
        token = facts.id
        if not sampling.greedy:
            token = draw(distribution(logits, sampling), sampling.seed, len(prefix) + len(ids))
        ids.append(token)
        confidence.append(facts.p1)
        margin.append(facts.p1 - facts.p2)
        alive *= facts.p1
        if len(ids) == gamma or is_eog(token) or alive < floor(len(ids)):
            return Chunk(np.array(ids, np.int32), _floats(confidence), _floats(margin))
        logits = speculator.follow(token, seq)


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float32)


class SpeculatorDrafter(Drafter):
    """A drafter with the speculator of a verifier in this process, which must verify every token: the speculator reads
    its states."""

    def __init__(self, verifier: Verifier, is_eog: Callable[[int], bool]) -> None:
        self._verifier, self._is_eog = verifier, is_eog
        self._speculator: Speculator | None = None

    @property
    def needs_verdict(self) -> bool:
        """Return True: the speculator stands still without the verifier."""
        return True

    def begin(self, state: GenerationState) -> None:
        """Take the speculator of the open session at the verifier."""
        self._speculator = self._verifier.speculator(state)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk; an empty one before the verifier has read the prompt, and while not even a sure token would
        pay."""
        if self._speculator is None:
            return Chunk()
        floors = state.rules.floors()
        if floors and floors[0] >= 1.0:
            return Chunk()

        def floor(drafted: int) -> float:
            return floors[drafted] if drafted < len(floors) else 0.0

        return draft(self._speculator, state.ids, min(gamma, state.tokens_left), state.sampling, self._is_eog, floor)

    def end(self) -> None:
        """Give the speculator back with the verifier's context."""
        self._speculator = None

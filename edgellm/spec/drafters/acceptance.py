"""The acceptance of drafted tokens by confidence, learned from verdicts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edgellm.spec.types import Chunk

_EDGES = (
    0.0,
    0.3,
    0.5,
    0.65,
    0.8,
    0.9,
    0.95,
    0.98,
    0.995,
    1.0,
)  # bins of confidence
_WEIGHT = 4.0  # tokens that the confidence itself counts for
_KEPT = 0.995  # decay per token

Probabilities = npt.NDArray[np.float64]


class Acceptance:
    """A running share for each range of confidence. Before any verdict the confidence itself is taken for the
    acceptance."""

    def __init__(self) -> None:
        self._accepted = [_WEIGHT * (low + high) / 2 for low, high in pairwise(_EDGES)]
        self._tries = [_WEIGHT] * len(self._accepted)

    def survives(self, confidence: Sequence[float]) -> list[float]:
        """Return for each token the chance that it and all before it are accepted, by their `confidence`."""
        chance, found = 1.0, []
        for each in confidence:
            at = _bin(each)
            chance *= self._accepted[at] / self._tries[at]
            found.append(chance)
        return found

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        """Return the chances that a chunk's tokens 0..t-1 are accepted and token t is not, for t in 0..gamma, shape
        (gamma + 1,); the last entry is *nothing rejected*.

        The paper estimates them from one acceptance rate of the pair (`verdict_prediction.rejection`): there a token
        with a confidence of 0.05 is still accepted more often than not, and most guesses go to verdicts that hardly
        ever happen.
        """
        reached = np.array([1.0, *self.survives(confidence)])
        return np.append(-np.diff(reached), reached[-1])

    def observe(self, chunk: Chunk, accepted: int) -> None:
        """Learn that the first `accepted` tokens of a chunk were accepted; copied tokens are left out."""
        own = 0 if chunk.retrieved else len(chunk) - chunk.tail
        if own:
            self.learn(chunk.confidence[:own].tolist(), min(own, accepted))

    def learn(self, confidence: Sequence[float], accepted: int) -> None:
        """Learn that the first `accepted` of the drafted tokens with this `confidence` were accepted."""
        for number, each in enumerate(confidence[: accepted + 1]):
            at = _bin(each)
            self._accepted[at] = _KEPT * self._accepted[at] + (number < accepted)
            self._tries[at] = _KEPT * self._tries[at] + 1.0


def _bin(confidence: float) -> int:
    return min(bisect_right(_EDGES, confidence), len(_EDGES) - 1) - 1

"""Gates: is a chunk worth the verifier's time?"""

from __future__ import annotations

import math

from edgellm.errors import InvalidOption
from edgellm.spec.records import Chunk, Decision
from edgellm.spec.sampling import Purpose, uniforms

_ALWAYS = Decision(True, "the gate is always open")
_NEVER = Decision(False, "the gate is never open")


class AlwaysGate:
    """Every chunk is verified: the reply is the verifier's own."""

    def decide(self, chunk: Chunk, written: int, max_tokens: int) -> Decision:  # noqa: ARG002
        return _ALWAYS


class NeverGate:
    """No chunk is verified: the reply is the draft model's own (the paper's edge-centric baseline)."""

    def decide(self, chunk: Chunk, written: int, max_tokens: int) -> Decision:  # noqa: ARG002
        return _NEVER


class ConfidenceGate:
    """Synera's coarse filter (section 4.2): confident chunks stay here, the others go with probability P_conf.

    The draw depends on the seed and on the place in the reply alone, so a run can be repeated.
    """

    def __init__(self, c_th: float, seed: int = 0) -> None:
        """`c_th` in [0, 1]: a chunk whose mean confidence is not above it is always verified.

        Raises:
            InvalidOption: `c_th` is not in [0, 1].
        """
        if not 0.0 <= c_th <= 1.0:
            raise InvalidOption(f"The confidence threshold {c_th} is not in [0, 1].", "Give one such as 0.8.")
        self._c_th = c_th
        self._seed = seed

    def decide(self, chunk: Chunk, written: int, max_tokens: int) -> Decision:  # noqa: ARG002
        confidence = float(chunk.confidence.sum()) / len(chunk)
        chance = p_conf(confidence, self._c_th)
        if chance >= 1.0:
            return Decision(True, f"confidence {confidence:.2f} is not above {self._c_th:.2f}")
        number = float(uniforms(self._seed, written, 1, Purpose.GATE)[0, 0])
        return Decision(
            number < chance,
            f"confidence {confidence:.2f}: a chance of {chance:.2f} to verify, and {number:.2f} was drawn",
        )


def p_conf(c: float, c_th: float, k: float = 10.0) -> float:
    """P_conf (Synera section 4.2): the probability that a chunk of mean confidence `c` is verified."""
    if c <= c_th or c_th >= 1.0:
        return 1.0
    n = (c - c_th) / (1.0 - c_th) - 0.5
    return 1.0 / (1.0 + math.exp(k * n))

"""What a user may choose about one reply."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from edgellm.errors import InvalidOption
from edgellm.spec.gates import AlwaysGate, ConfidenceGate, NeverGate
from edgellm.spec.protocols import Gate
from edgellm.spec.records import Sampling

GATES = ("always", "never", "confidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Choices for one reply; the defaults are greedy, and verify everything.

    `gate` is one of `GATES` or a gate of your own. `seed` None picks one, which the summary tells. `gamma` is the
    number of drafted tokens in a chunk, `confidence_threshold` the confidence gate's c_th.

    Raises:
        InvalidOption: a value that cannot be meant, named with the range that can.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None
    gate: str | Gate = "always"
    confidence_threshold: float = 0.8
    gamma: int = 4

    def __post_init__(self) -> None:
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("gamma", self.gamma, 1)
        _at_least("top_k", self.top_k, 0)
        if self.seed is not None:
            _at_least("seed", self.seed, 0)
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise InvalidOption(f"temperature is {self.temperature}.", "Give 0 (greedy) or a positive number.")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidOption(f"top_p is {self.top_p}.", "Give a number above 0 and up to 1; 1 switches it off.")
        if isinstance(self.gate, str) and self.gate not in GATES:
            raise InvalidOption(f"There is no gate named {self.gate!r}.", f"Choose one of {', '.join(GATES)}.")
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise InvalidOption(
                f"confidence_threshold is {self.confidence_threshold}.", "Give a number from 0 to 1, such as 0.8."
            )

    def sampling(self) -> Sampling:
        """The sampling that is asked for, with a fresh seed where none was given."""
        seed = self.seed if self.seed is not None else secrets.randbelow(2**32)
        return Sampling(self.temperature, self.top_k, self.top_p, seed)

    def make_gate(self, seed: int) -> Gate:
        """The gate that is asked for; its draws come from `seed`."""
        if not isinstance(self.gate, str):
            return self.gate
        if self.gate == "confidence":
            return ConfidenceGate(self.confidence_threshold, seed)
        return AlwaysGate() if self.gate == "always" else NeverGate()


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidOption(f"{name} is {value!r}.", f"Give a whole number of at least {least}.")

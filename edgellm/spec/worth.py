"""The gate that a profile fits: chunks are offloaded where that is predicted to be worth most."""

from __future__ import annotations

from edgellm.spec.budget import Ledger, Threshold
from edgellm.spec.profile import Profile
from edgellm.spec.records import Chunk, Decision
from edgellm.spec.sampling import Purpose, uniforms
from edgellm.spec.signals import signals, surprise


class WorthGate:
    """Offloads the chunks of highest predicted worth; how many is the budget. One gate serves one reply."""

    def __init__(self, profile: Profile, budget: float, ledger: Ledger, seed: int = 0) -> None:
        """`ledger` is shared by all replies of a pair: the budget holds over them together."""
        self._predictor = profile.predictor
        self._threshold = Threshold(profile.worth, budget, ledger)
        self._seed, self._usual = seed, profile.usual_importance
        self._before = 0.0

    def decide(self, chunk: Chunk, written: int, max_tokens: int) -> Decision:  # noqa: ARG002
        tie = float(uniforms(self._seed, written, 1, Purpose.GATE)[0, 2])
        score = self._predictor.score(signals(chunk, written, self._usual, self._before))
        decision = Decision(*self._threshold.decide(score, tie))
        if not decision.offload:
            self._before += surprise(chunk)
        return decision

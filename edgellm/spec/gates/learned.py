"""The gate that a profile fits: chunks are offloaded where that is most likely to save the reply."""

from __future__ import annotations

from edgellm.spec.gates.budget import BudgetController, Threshold
from edgellm.spec.gates.features import signals, surprise
from edgellm.spec.gates.profile import Profile
from edgellm.spec.protocols import Gate
from edgellm.spec.sampling import Purpose, uniforms
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision


class LearnedGate(Gate):
    """Offloads the chunks of highest worth (`offload_policy.py`); how many is the budget. One gate serves one reply."""

    def __init__(self, profile: Profile, budget: float, ledger: BudgetController, seed: int = 0) -> None:
        """Share `ledger` with all replies of the pair: the budget holds over all of them."""
        self._policy = profile.policy(budget)
        self._threshold = Threshold(self._policy.scores, budget, ledger)
        self._seed, self._usual = seed, profile.usual_importance
        self._so_far = 0.0
        self._alive = 1.0  # the chance that what stands in the reply is what the verifier would have written

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """See `Gate.decide`."""
        written = state.written
        tie = float(uniforms(self._seed, written, 1, Purpose.GATE)[0, 2])
        rejected, hope = self._policy.judge(signals(chunk, written, self._usual, self._so_far))
        offload, reason = self._threshold.decide(self._alive * rejected * hope, tie)
        why = f"wrong with {rejected:.0%}, in a reply that is right so far with {self._alive:.0%}: {reason}"
        self._so_far += surprise(chunk)
        if not offload:
            self._alive *= 1.0 - rejected
        return Decision(offload, why)

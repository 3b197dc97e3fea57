"""Drafts of the tokens that a verifier writes alone at a device's request, by its speculator."""

from collections.abc import Callable
from time import perf_counter

from edgellm.engine.speculators.speculator import Speculator
from edgellm.spec.drafters.model import ChunkBuilder
from edgellm.spec.drafters.speculator import draft
from edgellm.spec.drafting.policy import TUNING, Arm, ModelArm
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import NO_CHUNK, Chunk
from edgellm.verifier.scheduler import Job


class Bandit:
    """A two-armed bandit by seconds per token, whose second arm comes first. Once each arm was tried as often as a
    draft model is, it uses the faster one, and tries the other once its share of the time pays for that."""

    def __init__(self) -> None:
        self.arms = Arm(), Arm()
        self._saved = 0.0  # seconds that a try of the slower arm may cost

    def second(self) -> bool:
        """Return whether to use the second arm next."""
        first, second = self.arms
        if min(first.count, second.count) < ModelArm.rounds_tried:
            return second.count <= first.count
        faster = second.pace <= first.pace
        other, pace = self.arms[not faster], self.arms[faster].pace
        if self._saved > max(0.0, other.seconds - other.tokens * pace):
            self._saved = 0.0
            return not faster
        return faster

    def record(self, second: bool, tokens: int, seconds: float) -> None:
        """Record that an arm wrote `tokens` in `seconds`."""
        self.arms[second].add(tokens, seconds)
        self._saved += TUNING.exploration * seconds


class ExtraDrafts:
    """A drafter of extra tokens, by the `speculator` of the engine's context, while passes with drafts write more
    tokens per second than passes without. A verdict brings the same tokens, in fewer passes."""

    def __init__(self, speculator: Speculator, is_eog: Callable[[int], bool]) -> None:
        self._speculator, self._is_eog = speculator, is_eog
        self._choice = Bandit()
        self._longest = ModelArm.first_draft  # doubled once half are right: trying a useless speculator costs little
        self._drafting = 0.0  # seconds of the last draft

    def draft(self, job: Job) -> Chunk:
        """Return a draft of up to all but the last of `job`'s remaining extra tokens; none if drafts do not pay."""
        left, self._drafting = job.request.extra - job.accepted - len(job.tokens), 0.0
        if left < 1 or not self._choice.second():
            return NO_CHUNK
        began = perf_counter()
        state = GenerationState(job.ids, job.request.sampling)
        chunk = ChunkBuilder(state, min(left, self._longest))
        drafted = draft(self._speculator, state, chunk, self._is_eog, job.slot)
        self._drafting = perf_counter() - began
        return drafted

    def observe(self, drafted: int, tokens: int, seconds: float) -> None:
        """Observe a pass of `seconds` over the last draft, of `drafted` tokens, which wrote `tokens`."""
        seconds += self._drafting
        if drafted >= self._longest and 2 * (tokens - 1) >= drafted:
            self._longest = 2 * drafted
        self._choice.record(drafted > 0, tokens, seconds)

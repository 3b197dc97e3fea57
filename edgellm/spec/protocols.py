"""Interfaces of drafters, gates and verifiers, which compose freely.

A round is *propose* (drafter), *decide* (gate), *verify* (verifier session) and *observe* (drafter and gate). Methods
that a mechanism does not need have empty defaults; `examples/` has one mechanism of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.spec.sampling import WHOLE_ROWS, Choice
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Round, Sampling, Verdict
from edgellm.spec.verifier import Session, settled

if TYPE_CHECKING:
    from edgellm.engine.speculators.speculator import Speculator
    from edgellm.spec.drafting.cost_curve import CostCurve


class Drafter(ABC):
    """A proposer of next tokens: a small model, retrieval, or both. It serves one reply at a time."""

    needs_verdict: bool = False
    """Drafts must be verified, so that nothing is written without a verifier."""

    def begin(self, state: GenerationState) -> None:
        """Prepare for a reply that begins."""
        return

    @abstractmethod
    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Return up to `gamma` tokens to follow `state.ids`; an empty chunk if there are none.

        The drafter syncs its own cache with the text: it rolls back rejected drafts and takes over corrections. A chunk
        ends at an end-of-generation token. Raise Stopped where `state.should_stop` returned True meanwhile.
        """

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft up to `gamma` tokens after each predicted verdict on `chunk`, until `until` returns True. `chunk` is
        being verified, or will be once the verifier has read the prompt."""
        return

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """Return the part of `chunk` that may stand without a verdict: nothing if `needs_verdict`."""
        return Chunk() if self.needs_verdict else chunk

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Observe a finished round, whose tokens are about to be committed."""
        return

    def end(self) -> None:
        """Clean up after a reply that is over."""
        return

    def close(self) -> None:
        """Free memory. The drafter is not used again."""
        return


class Gate(ABC):
    """A judge of whether a chunk is worth the verifier's time, for one reply."""

    layers: tuple[int, ...] = ()
    """Layers of the draft model whose attention the gate needs as the importance of drafted tokens."""

    @abstractmethod
    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """Return whether `chunk`, which is not empty and follows `state.ids`, goes to the verifier, and why."""

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Observe a finished round, whose tokens are about to be committed."""
        return


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a verifier."""

    name: str
    context_length: int  # positions of a session
    logprobs: bool = False  # verdicts can have them
    penalties: bool = False  # it follows sampling rules with penalties
    grammars: bool = False  # it follows sampling rules with a constraint
    choice: Choice = WHOLE_ROWS  # the set that tokens are chosen from
    speculator: str = ""  # name of the speculator on the states of sessions in this process

    def refusal(self, sampling: Sampling) -> str:
        """Return why tokens cannot be chosen by `sampling`, as a clause; "" if they can."""
        if sampling.penalties is not None and not self.penalties:
            return "it applies no penalties"
        if sampling.constraint is not None and not self.grammars:
            return "it follows no JSON schemas"
        return self.choice.refusal(sampling)


class Verifier(ABC):
    """A judge of chunks: in this process, over a link, or a mesh of layer workers. By default, a verifier has only a
    `name` and a `context_length`, and is never away."""

    name: str
    context_length: int
    extra: int = 0
    """Further tokens of a verdict that a reply without a draft model is to ask for."""

    @property
    def capabilities(self) -> Capabilities:
        """Return the abilities, which may change when a verifier is replaced."""
        return Capabilities(self.name, self.context_length)

    @property
    def shared(self) -> int:
        """Return the number of decodes in this process that shared the cores, and have unrepresentative times."""
        return 0

    @property
    def crowded(self) -> bool:
        """Return whether several replies share batches, which drafts would make longer."""
        return False

    def use_curve(self, curve: CostCurve) -> None:
        """Choose the pieces in which prompts are read by a measured cost curve."""
        return

    def speculator(self, state: GenerationState) -> Speculator | None:
        """Return the speculator of the open session of a reply, if any."""
        return None

    @abstractmethod
    def open(self, state: GenerationState) -> Session:
        """Return a session for the reply. Raise VerifierUnreachable without an answer, and VocabularyMismatch, which
        names the first differing token."""

    def close(self) -> None:
        """Free memory."""
        return


class BlockingSession(Session, ABC):
    """The session of a verifier of your own, which computes a verdict in the thread that asks for it."""

    @abstractmethod
    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return the verdict that `Session.submit` asks for."""

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Future[Verdict]:
        return settled(self.verify(prefix, chunk, extra))

    def wait(self, pending: Future[Verdict]) -> Verdict:
        return pending.result()

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        return

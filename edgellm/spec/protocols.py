"""Interfaces of drafters and gates, which compose freely with each other and with a `Verifier`.

A round is *propose* (drafter), *decide* (gate), *verify* (verifier session) and *observe* (drafter and gate). Methods
that a mechanism does not need have empty defaults; `examples/` has one mechanism of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round


class Drafter(ABC):
    """Proposes the next tokens: a small model, retrieval, or both. It serves one reply at a time."""

    @property
    def needs_verdict(self) -> bool:
        """Return whether its drafts must be verified, so that nothing is written without a verifier."""
        return False

    def begin(self, state: GenerationState) -> None:
        """Prepare for a reply that begins."""
        return

    @abstractmethod
    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Return up to `gamma` tokens to follow `state.ids`; an empty chunk if there are none.

        The drafter syncs its own cache with the text: it rolls back rejected drafts and takes over corrections. A chunk
        ends at an end-of-generation token.

        Raises:
            Stopped: `state.should_stop` returned True meanwhile.
        """

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft up to `gamma` tokens after each predicted verdict on `chunk`, until `until` returns True.

        `chunk` is being verified, or will be once the verifier has read the prompt.
        """
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
    """Decides whether a chunk is worth the verifier's time. It serves one reply."""

    layers: tuple[int, ...] = ()
    """Layers of the draft model whose attention the gate needs as the importance of drafted tokens."""

    @abstractmethod
    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """Return whether `chunk`, which is not empty and follows `state.ids`, goes to the verifier, and why."""

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Observe a finished round; see `Drafter.observe`."""
        return

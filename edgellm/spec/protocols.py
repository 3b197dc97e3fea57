"""Interfaces of decoding: drafter, gate and verifier, which compose freely.

A round is *propose* (drafter), *decide* (gate), *verify* (verifier session) and *observe* (drafter and gate). Methods
that a mechanism does not need have empty defaults; `examples/` has one mechanism of each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from edgellm.engine import Speculator
from edgellm.spec.sampling import WHOLE_ROWS, Choice
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Round, Verdict


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
            Stopped: `state.stopped` returned True meanwhile.
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


class Pending(Protocol):
    """A verdict on its way."""

    def done(self) -> bool: ...

    def result(self) -> Verdict:
        """Wait for the verdict.

        Raises:
            VerifierLost: the verifier is gone or makes no progress. The session stays usable: it reconnects by itself
                with backoff, and `VerifierSession.ready` says when asking again makes sense.
            Stopped: the reply was cancelled meanwhile.
        """
        ...


class VerifierSession(ABC):
    """One reply's state at the verifier."""

    def ready(self) -> bool:
        """Return whether a chunk can be submitted now. Costs nothing; False while the verifier is away."""
        return True

    @abstractmethod
    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Pending:
        """Ask for a verdict on `chunk` after `prefix` (all tokens so far, prompt included, shape (n,)).

        The session works out which tokens of `prefix` the verifier has not seen. An empty chunk asks for the
        verifier's own next token; `extra` asks for up to that many further tokens written by the verifier alone.
        """

    def close(self) -> None:
        """End the reply; abandon what is in flight."""
        return


class BlockingSession(VerifierSession):
    """A session that computes a verdict in the thread that waits for it."""

    @abstractmethod
    def verify(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Verdict:
        """Return the verdict that `submit` asks for."""

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Pending:
        """See `VerifierSession.submit`; nothing is computed before the verdict is waited for."""
        return _Deferred(self, prefix, chunk, extra)


class _Deferred:
    """A verdict that is computed once, when it is asked for."""

    def __init__(self, session: BlockingSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._session, self._asked = session, (prefix, chunk, extra)
        self._verdict: Verdict | None = None

    def done(self) -> bool:
        return True

    def result(self) -> Verdict:
        if self._verdict is None:
            self._verdict = self._session.verify(*self._asked)
        return self._verdict


class Verifier(ABC):
    """Scores chunks: in this process, over a link, or a mesh of layer workers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the model's name."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Return the number of positions of a session."""

    @property
    def reports_logprobs(self) -> bool:
        """Return whether verdicts can include log-probabilities."""
        return False

    @property
    def applies_penalties(self) -> bool:
        """Return whether verdicts can follow a sampling rule with penalties."""
        return False

    @property
    def applies_grammars(self) -> bool:
        """Return whether verdicts can follow a sampling rule with a constraint."""
        return False

    @property
    def choice(self) -> Choice:
        """Return from what tokens are chosen."""
        return WHOLE_ROWS

    @property
    def shared(self) -> int:
        """Return the number of decodes in this process that shared the cores with others, so that their times are not
        representative."""
        return 0

    @property
    def drafts_extra(self) -> bool:
        """Return whether the verifier drafts extra tokens, so that several come from one pass; see
        `VerifierSession.submit`."""
        return False

    @property
    def speculator_name(self) -> str:
        """Return what drafts from the states of sessions, for a drafter in this process to use; "" where nothing
        does."""
        return ""

    def speculator(self, state: GenerationState) -> Speculator | None:
        """Return the speculator of the open session of a reply; None where there is none."""
        return None

    @abstractmethod
    def open(self, state: GenerationState) -> VerifierSession:
        """Return a session for the reply.

        Raises:
            VerifierUnreachable: there is no answer.
            VocabularyMismatch: the two vocabularies differ; names the first differing token.
        """

    def close(self) -> None:
        """Free memory."""
        return

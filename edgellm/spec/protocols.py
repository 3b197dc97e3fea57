"""The seams of decoding: any drafter, any gate and any verifier compose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from edgellm.spec.ngram.context_lookup import Precedents
from edgellm.spec.types import Chunk, Decision, Ids, Sampling, Verdict


class Drafter(Protocol):
    """Proposes what comes next: a small model, retrieval, or both."""

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """Up to `gamma` tokens to follow `prefix` (all tokens so far, prompt included, shape (n,)).

        The drafter brings its own cache in line with `prefix`, whatever it was asked before: rejected drafts are
        rolled back, corrections taken over. A chunk ends at an end-of-generation token. Empty: nothing to say.
        """
        ...

    def close(self) -> None:
        """Gives memory back. The drafter is not used again."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A drafter that drafts on while a verdict is on its way."""

    def look_ahead(
        self, prefix: Ids, chunk: Chunk, *, gamma: int, sampling: Sampling, until: Callable[[], bool]
    ) -> None:
        """Drafts behind guesses at the verdict on `chunk`, which follows `prefix`, until `until` says that it came.

        The next `draft` takes over what it can use.
        """
        ...


@runtime_checkable
class Copies(Protocol):
    """A drafter whose drafts may be copied, from what no model wrote: those never stand without a verdict."""

    @property
    def only(self) -> bool:
        """Whether it has nothing else, so that without a verifier nobody writes."""
        ...

    def unchecked(self, chunk: Chunk, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """What may stand where no verdict came on `chunk`: nothing copied. Empty where it only copies."""
        ...


class Suggests(Protocol):
    """Knows what may come next, without a model."""

    def suggest(self, prefix: Ids, drafted: Sequence[int], floors: Sequence[float]) -> Sequence[int]:
        """Tokens that may follow `prefix` and `drafted`, each with at least the chance that stands in its place."""
        ...


@runtime_checkable
class Learns(Protocol):
    """A drafter that learns from verdicts how much to draft."""

    def told(self, chunk: Chunk, verdict: Verdict, seconds: float) -> None:
        """The verdict on the last chunk, empty or not, `seconds` after drafting it began."""
        ...


class Gate(Protocol):
    """Decides whether a chunk is worth the verifier's time.

    One that wants importance measured names the layers whose attention it is, as `layers: tuple[int, ...]`.
    """

    def decide(self, chunk: Chunk, written: int, max_tokens: int) -> Decision:
        """`written` tokens of at most `max_tokens` stand before `chunk`."""
        ...


@runtime_checkable
class AsksContext(Protocol):
    """A drafter that may take what the context says where its model hesitates."""

    precedents: Precedents | None
    """Of the reply; None: it does not ask the context."""
    hesitates: float
    """The confidence below which it takes what the context says."""


@runtime_checkable
class Heeds(Protocol):
    """A drafter or a session that may compute, or wait, for long, and leaves off where nobody wants that any more."""

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """From now on `stopped` is asked meanwhile. Where it says so, what is under way raises Stopped, and all is as
        sound as before. None: nobody is asked.
        """
        ...


class Pending(Protocol):
    """A verdict on its way."""

    def done(self) -> bool: ...

    def result(self) -> Verdict:
        """Waits for the verdict.

        Raises:
            VerifierLost: the verifier is gone or makes no progress. The session stays usable: it reconnects by itself
                with backoff, and `VerifierSession.ready` says when asking again makes sense.
        """
        ...


class VerifierSession(Protocol):
    """One reply's state at the verifier."""

    def ready(self) -> bool:
        """Whether a chunk can be submitted now. Costs nothing; False while the verifier is away."""
        ...

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Pending:
        """Asks for a verdict on `chunk` after `prefix` (all tokens so far, prompt included, shape (n,)).

        The session works out which tokens of `prefix` the verifier has not seen. An empty chunk asks for the
        verifier's own next token; `extra` asks for up to that many further tokens written by the verifier alone.
        """
        ...

    def close(self) -> None:
        """Ends the reply; abandons what is in flight."""
        ...


class Verifier(Protocol):
    """Scores chunks: in this process, over a link, or a mesh of layer workers."""

    @property
    def name(self) -> str: ...

    @property
    def context_length(self) -> int:
        """Positions one session can hold."""
        ...

    def open(self, sampling: Sampling) -> VerifierSession:
        """A session for one reply.

        Raises:
            VerifierUnreachable: nobody answers.
            VocabularyMismatch: the two vocabularies differ; names the first differing token.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Tells(Protocol):
    """A verifier whose verdicts can bring the probabilities of their tokens."""

    @property
    def name(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def tells(self) -> bool:
        """Whether they do; of one across a link its version says so."""
        ...

    def open(self, sampling: Sampling, *, logprobs: int | None = None) -> VerifierSession:
        """As `Verifier.open`. Verdicts bring the `logprobs` of their tokens, and of so many others, where a number is
        given."""
        ...

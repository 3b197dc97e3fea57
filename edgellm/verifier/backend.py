"""What answers the requests of sessions, whoever brings them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.judgement import Deliver


class VerifierBackend(ABC):
    """Answers verify requests: an engine in a thread of its own, or stock servers. Methods may come from any thread."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return a number that grows as long as what is asked for makes progress."""

    @abstractmethod
    def wait_seconds(self) -> float:
        """Return the expected seconds until the waiting requests are answered."""

    @abstractmethod
    def submit(self, request: VerifyRequest, deliver: Deliver) -> None:
        """Request a verdict; the tenant of a session is always the same. `deliver` is called with the answer from any
        thread, and must not block, unless the session ends first. VerifierBusy says when to ask again."""

    @abstractmethod
    def end_session(self, session: int) -> None:
        """End the session, and drop its waiting request."""

    def ready(self) -> bool:
        """Return whether a request would be worked on now."""
        return True

    @abstractmethod
    def start(self) -> None:
        """Begin to answer."""

    @abstractmethod
    def close(self) -> None:
        """Answer no more, and release what is held for answering."""

"""Replies whose tokens tell how probable they were."""

from __future__ import annotations

from edgellm.spec.local import LocalVerifier
from edgellm.spec.options import ReplyOptions
from edgellm.spec.protocols import VerifierSession
from edgellm.spec.records import Sampling


def why_not(linked: bool, verified: bool, options: ReplyOptions) -> str:
    """Why the text of a reply would not be one local model's alone, so that nobody knows its probabilities; "" if it
    would. `linked`: the verifier is on another device; `verified`: there is one beside the model.
    """
    if linked:
        return "the verifier is on another device, and does not send them"
    if verified and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified, and what is not is not the verifier's"
    return ""


class Telling:
    """A verifier of this process whose verdicts bring the probabilities of their tokens, and of `most` others."""

    def __init__(self, verifier: LocalVerifier, most: int) -> None:
        self._verifier, self._most = verifier, most
        self.name, self.context_length = verifier.name, verifier.context_length

    def open(self, sampling: Sampling) -> VerifierSession:
        return self._verifier.open(sampling, logprobs=self._most)

    def close(self) -> None:
        """The verifier is somebody else's."""

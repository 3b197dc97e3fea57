"""Replies whose tokens tell how probable they were."""

from __future__ import annotations

from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Tells, VerifierSession
from edgellm.spec.types import Sampling


def why_not(silent: bool, verified: bool, options: ReplyOptions) -> str:
    """Why the text of a reply would not be alone that of one model which tells its probabilities; "" if it would.
    `silent`: the verifier is on another device, and does not tell; `verified`: there is one beside the model.
    """
    if silent:
        return "the verifier is on another device, and does not send them"
    if verified and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified, and what is not is not the verifier's"
    return ""


class Telling:
    """A verifier whose verdicts bring the probabilities of their tokens, and of `most` others."""

    def __init__(self, verifier: Tells, most: int) -> None:
        self._verifier, self._most = verifier, most
        self.name, self.context_length = verifier.name, verifier.context_length

    def open(self, sampling: Sampling) -> VerifierSession:
        return self._verifier.open(sampling, logprobs=self._most)

    def close(self) -> None:
        """The verifier is somebody else's."""

"""Replies whose tokens come with their log-probabilities."""

from __future__ import annotations

from edgellm.spec.params import ReplyOptions


def why_not(silent: bool, verified: bool, options: ReplyOptions) -> str:
    """Return why the tokens of a reply would not all be those of one model that reports probabilities, "" otherwise.
    `silent`: the verifier is on another device, and does not report; `verified`: there is one beside the model.
    """
    if silent:
        return "the verifier is on another device, and does not send them"
    if verified and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified, and what is not is not the verifier's"
    return ""

"""Replies whose tokens tell how probable they were."""

from __future__ import annotations

from edgellm.spec.params import ReplyOptions


def why_not(silent: bool, verified: bool, options: ReplyOptions) -> str:
    """Why the text of a reply would not be alone that of one model which tells its probabilities; "" if it would.
    `silent`: the verifier is on another device, and does not tell; `verified`: there is one beside the model.
    """
    if silent:
        return "the verifier is on another device, and does not send them"
    if verified and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified, and what is not is not the verifier's"
    return ""

"""The messages of a request to the models."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.engine import Message


def compose(
    prompt: str, *, context: Sequence[str] = (), history: Sequence[Message] = (), system: str | None = None
) -> list[Message]:
    """Return a request's messages: `history` (earlier turns), then a user turn with the `context` texts and `prompt`.

    The user turn has the form that the bundled models are trained on: the context texts first, a blank line after each,
    then the question. `system` opens the conversation, unless `history` already has such a turn.
    """
    texts = [stripped for text in context if (stripped := text.strip())]
    opening = [Message("system", system)] if system and not any(m.role == "system" for m in history) else []
    return [*opening, *history, Message("user", "\n\n".join([*texts, prompt]))]

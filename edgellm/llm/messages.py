"""Messages of a conversation, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engine import Message, Model
from edgellm.engine.native import ShouldStop, never
from edgellm.errors import InputNotText, InvalidOption, PromptTooLong
from edgellm.spec.types import Ids


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


def chat_ids(model: Model, prompt: str | Sequence[Message], context: int, should_stop: ShouldStop = never) -> Ids:
    """Return the ids of a question or a conversation in the model's chat template, shape (n,), n below `context`.
    `should_stop` is polled.

    Raises:
        Stopped: `should_stop` returned True.
        TextRefused: the model's tokenizer fails on it, or takes too long.
        InvalidOption: it is empty.
        InputNotText: it is not valid Unicode.
        PromptTooLong: it does not fit the context; states both lengths.
    """
    messages = compose(prompt) if isinstance(prompt, str) else list(prompt)
    if not messages or not messages[-1].content.strip():
        raise InvalidOption("The prompt is empty.", "Write a question.")
    for message in messages:
        _check_text(message.content)
    return _check_length(model.chat_prompt(messages, most=context - 1, should_stop=should_stop), context)


def plain_ids(model: Model, prompt: str | Sequence[int], context: int, should_stop: ShouldStop = never) -> Ids:
    """Return the ids (n,) of a text without template, or of given tokens. Raises what `chat_ids` raises, InvalidOption
    for an invalid token."""
    if isinstance(prompt, str):
        _check_text(prompt)
        ids = model.plain_prompt(prompt, most=context - 1, should_stop=should_stop)
    else:
        if (bad := next((token for token in prompt if not 0 <= token < model.n_vocab), None)) is not None:
            raise InvalidOption(f"{bad} is not a token of {model.name}.", f"Ids are 0 to {model.n_vocab - 1}.")
        ids = np.array(prompt, dtype=np.int32)
    if not len(ids):
        raise InvalidOption("The prompt is empty.", "Write a text to continue.")
    return _check_length(ids, context)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputNotText("The prompt holds bytes that are not UTF-8.", "Convert it to UTF-8 first.") from None


def _check_length(ids: Ids, context: int) -> Ids:
    if len(ids) >= context:
        raise PromptTooLong(
            f"The prompt has {len(ids)} tokens, and the context holds {context} with the reply.",
            "Shorten the prompt, its context files or the history.",
        )
    return ids

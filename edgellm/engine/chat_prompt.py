"""A conversation as token ids, in which only the model's own template can write control tokens.

The template is rendered in a sandbox (`edgellm.engine.chat_template`), and a second time with placeholders for the
messages: that shows which control tokens are the template's own, and where each message ended up. A message that
spells out a control token is then tokenised separately, as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.engine.chat_template import Template
from edgellm.engine.native import ShouldStop, never
from edgellm.engine.vocabulary import Ids
from edgellm.errors import InvalidOption, ModelUnsupported

ROLES = ("system", "user", "assistant")
_OPEN, _CLOSE = "\ue000", "\ue001"  # around a placeholder's number; in that rendering only our own text holds them
_HOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The functions of a model that the template needs: text to ids, and which of the ids are control tokens.

    `encode` takes a text, whether control tokens in it are parsed, the most ids and whether the caller has given up;
    `check_length` a text and the most ids. Both raise PromptTooLong.
    """

    encode: Callable[[str, bool, int | None, Callable[[], bool]], Ids]
    check_length: Callable[[str, int | None], None]
    text: Callable[[int], str]
    is_control: Callable[[int], bool]

    def controls(self, ids: Ids) -> list[int]:
        known = {token for token in np.unique(ids).tolist() if self.is_control(token)}
        return [token for token in ids.tolist() if token in known] if known else []


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, template: Template, bos: str, eos: str, tokenizer: Tokenizer, model: str) -> None:
        """Set up; `bos` and `eos` are the texts of those tokens, `model` the name for messages."""
        self._template, self._tokenizer, self._model = template, tokenizer, model
        self._bos, self._eos = bos, eos

    def prompt(self, messages: Sequence[Message], most: int | None = None, should_stop: ShouldStop = never) -> Ids:
        """Return the ids of the rendered conversation, shape (n,), with the opening of the assistant's turn at the end.

        Raises:
            InvalidOption: an unknown role, no message, or text that the template would turn into control tokens.
            ModelUnsupported: the template is not valid, refuses the conversation, or takes more than its limits.
            EngineFailed: the process that renders it could not be started, or was ended from outside.
            PromptTooLong: there are more than `most` ids.
            TextRefused, Stopped: as for `VocabTokenizer.encode`.
        """
        if not messages:
            raise InvalidOption("There is no message to answer.", "Give at least one.")
        for message in messages:
            if message.role not in ROLES:
                raise InvalidOption(f"{message.role!r} is not a message role.", f"Use one of {', '.join(ROLES)}.")
        try:
            plain = self._render(messages)
        except ModelUnsupported:
            merged = _without_system(messages)
            if merged is None:
                raise
            messages, plain = merged, self._render(merged)
        self._tokenizer.check_length(plain, most)
        return self._tokenise(
            messages, plain, lambda text, special: self._tokenizer.encode(text, special, most, should_stop)
        )

    def _tokenise(self, messages: Sequence[Message], plain: str, encode: Callable[[str, bool], Ids]) -> Ids:
        controls = self._tokenizer.controls
        skeleton = self._render([replace(m, content=f"{_OPEN}{i}{_CLOSE}") for i, m in enumerate(messages)])
        expected = controls(encode(skeleton, True))
        contents = [m.content for m in messages]
        for written in (contents, [c.strip() for c in contents]):
            parts = _HOLDER.split(skeleton)  # template text and message numbers alternate
            if "".join(written[int(p)] if i % 2 else p for i, p in enumerate(parts)) == plain:
                ids = encode(plain, True)
                if controls(ids) == expected:
                    return ids
                return _joined(
                    [encode(written[int(p)], False) if i % 2 else encode(p, True) for i, p in enumerate(parts)]
                )
        # The template rewrites the messages, so they cannot be found in its output: break control tokens beforehand.
        used = set(plain)
        mark = next((c for c in map(chr, range(0xF8FF, 0xE001, -1)) if c not in used), None)
        if mark is None:
            raise InvalidOption("A message uses every private-use character of Unicode.", "Remove some of them.")
        text = self._render([replace(m, content=self._broken(m.content, mark, encode)) for m in messages])
        ids = _joined([encode(part, True) for part in text.split(mark)])
        if controls(ids) != expected:
            raise InvalidOption(
                f"A message contains control tokens of {self._model}, and its chat template rewrites the message.",
                "Remove texts such as <|...|> from the message.",
            )
        return ids

    def _broken(self, content: str, mark: str, encode: Callable[[str, bool], Ids]) -> str:
        """Return the content with a `mark` inside everything that would be parsed as a control token."""
        while True:
            before = content
            for token in dict.fromkeys(self._tokenizer.controls(encode(content, True))):
                name = self._tokenizer.text(token)
                content = content.replace(name, name[:1] + mark + name[1:])
            if content == before:
                return content

    def _render(self, messages: Sequence[Message]) -> str:
        return self._template.render([{"role": m.role, "content": m.content} for m in messages], self._bos, self._eos)


def _without_system(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages with the system message moved into the first user message, for templates without a system
    role; None where the first two messages have other roles."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    return [Message("user", f"{messages[0].content}\n\n{messages[1].content}"), *messages[2:]]


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts)

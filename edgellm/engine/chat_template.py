"""A model's chat template, and a conversation as token ids in which only that template can write control tokens.

A template is a stranger's program. A child process (`edgellm.isolation.template_child`) runs Jinja's own sandbox within
the system's limits, and is kept for the next conversation. A template in KNOWN is rendered in this process by the same
function: we have written it, and it takes time and memory in proportion to the conversation. So the bundled pair waits
for no second Python, which takes 80 ms of a core to start. Another model's child starts while the model loads. A
rendering in the child takes about 0.4 ms more than one here, however long the conversation
(`python -m bench.engine.chat_templates`).

A conversation is rendered a second time with placeholders for the messages: that shows which control tokens are the
template's own, and where each message ended up. A message that spells out a control token is then tokenised separately,
as plain text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from edgellm.engine.native import ShouldStop, never
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported
from edgellm.isolation.child_process import ChildFailed, ChildProcess, Limits
from edgellm.isolation.template_child import (
    MEMORY,
    MEMORY_PER_BYTE,
    RENDERED,
    SECONDS,
    Renderer,
    arguments,
    compile_template,
    describe,
)

KNOWN = frozenset({"6b336c08d92c5d40ca5f840ba10c40952a20d3b9c58bf8de920ed04fd703cc9b"})
"""SHA-256 of templates that are harmless: the bundled pair's."""
MOST_SOURCE = 2**16  # characters of a template; known ones have 20,000 at most
_STARTING = Limits(seconds=30.0, memory=2**30, answer=0)  # Python starts and imports Jinja
_ANSWER, _ANSWER_PER_BYTE = 2**20, 16  # bytes of a rendered text, and for each byte of the conversation
_SAID = 400  # characters of what the child says about an error
_MODULE = "edgellm.isolation.template_child"
T = TypeVar("T")
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")  # variables that Python may need to start, or the date


class Template:
    """A chat template and the name of its `model`; several threads may render it at the same time, by turns."""

    def __init__(self, source: str, model: str) -> None:
        """Set up; `model` is the name for messages. Nothing is compiled yet, and no process started."""
        self.source, self.model = source, model
        self._is_known = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in KNOWN
        self._child: ChildProcess | None = None
        self._has_source = False  # of the child
        self._known_arguments: Sequence[str] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child process where one is needed, without waiting for it, so that the first rendering need not.
        Where none can be started, the first rendering says why."""
        if not self._is_known:
            with self._lock, suppress(EngineFailed):
                self._running()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        bos: str,
        eos: str,
        arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text, followed by the opening of the assistant's turn. `arguments` are further
        variables of the template.

        Raises:
            ModelUnsupported: the template is not valid Jinja, or too long, or it fails, or takes more than its limits.
            InvalidOption: an argument cannot be written as JSON.
            EngineFailed: the child process could not be started, or was ended from outside.
        """
        conversation = {**arguments, "messages": messages, "bos_token": bos, "eos_token": eos}
        return self._do(lambda: self._renderer(conversation), lambda child: self._render(child, conversation))

    def arguments(self) -> Sequence[str]:
        """Return the names of the arguments that the template reads, sorted. Raises what `render` raises."""
        if self._known_arguments is None:
            self._known_arguments = self._do(lambda: arguments(self.source), self._arguments)
        return self._known_arguments

    def _do(self, here: Callable[[], T], there: Callable[[ChildProcess], T]) -> T:
        """Return the result of `here` for a known template, else that of `there`."""
        if self._is_known:
            try:
                return here()
            except Exception as error:  # noqa: BLE001  as in the child
                raise self._refused(describe(error)) from None
        if len(self.source) > MOST_SOURCE:
            raise self._refused(f"it has {len(self.source)} characters; at most {MOST_SOURCE} are allowed")
        with self._lock:
            for _ in range(2):
                with suppress(BrokenPipeError):  # it has ended since the last time
                    return there(self._running())
        raise EngineFailed("The process that renders chat templates exits at once.", "Try again.")

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if self._child is not None:
                self._child.close()

    @cached_property
    def _renderer(self) -> Renderer:
        return compile_template(self.source)

    def _running(self) -> ChildProcess:
        """Return the child process, another one where it has ended."""
        if self._child is None or not self._child.alive:
            kept = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
            self._child, self._has_source = ChildProcess(_MODULE, environment=kept), False
        return self._child

    def _render(self, child: ChildProcess, conversation: Mapping[str, object]) -> str:
        if not self._has_source:
            self._await_start(child)
            self._ask(child, {"source": self.source})
            self._has_source = True
        return self._ask(child, conversation)

    def _arguments(self, child: ChildProcess) -> list[str]:
        if not self._has_source:
            self._await_start(child)
        try:
            names = json.loads(self._ask(child, {"arguments_of": self.source}))
        except (ValueError, RecursionError) as error:
            raise self._refused(f"its arguments are unknown: {error}") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused("its arguments are unknown")
        return names

    @staticmethod
    def _await_start(child: ChildProcess) -> None:
        try:
            child.ask(b"", _STARTING)
        except ChildFailed as error:
            raise EngineFailed(
                f"The process that renders chat templates does not start: {error}.", "Install edgellm again."
            ) from None

    def _ask(self, child: ChildProcess, asked: Mapping[str, object]) -> str:
        """Return the text of the child's answer, about which nothing is taken for granted."""
        try:
            request = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(
                f"An argument of the chat template cannot be written as JSON: {error}.", "Give plain values."
            ) from None
        size = len(request)
        limits = Limits(SECONDS, MEMORY + MEMORY_PER_BYTE * size, _ANSWER + _ANSWER_PER_BYTE * size)
        try:
            answer = child.ask(request, limits)
            text = answer[1:].decode("utf-8", "surrogatepass")
        except (ChildFailed, UnicodeDecodeError) as error:
            raise self._refused(str(error)) from None
        if answer[:1] != RENDERED:
            raise self._refused(text[:_SAID])
        return text

    def _refused(self, why: str) -> ModelUnsupported:
        return ModelUnsupported(
            f"The chat template of {self.model} fails: {why}.",
            "Change the conversation (roles may have to alternate), or use another model.",
        )


ROLES = ("system", "user", "assistant", "tool")
_OPEN, _CLOSE = "\ue000", "\ue001"  # around a placeholder's number; in that rendering only our own text holds them
_HOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of a function: its name, its `arguments` as a JSON object, and an id that its result refers to."""

    name: str
    arguments: str
    id: str = ""

    def fields(self, *, parsed: bool = True) -> dict[str, object]:
        """Return the call as templates know it; most take the arguments `parsed`, and some as a text."""
        arguments: object = json.loads(self.arguments) if parsed else self.arguments
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is `system`, `user`, `assistant` or `tool`. `thinking` is the thought before
    an assistant's `content`; most templates leave it out of earlier turns. `tool_calls` are an assistant's; the result
    of one of them is the content of a turn of `tool`, with the call's `call_id` and the function's `name`. `context`
    are texts that a user's question is about, which `whole` puts before it."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    context: tuple[str, ...] = ()

    def whole(self) -> Message:
        """Return the message with its `context` in its content: a blank line after each text, as the bundled models are
        trained."""
        texts = [stripped for text in self.context if (stripped := text.strip())]
        return replace(self, content="\n\n".join([*texts, self.content]), context=())

    def fields(self, *, parsed: bool = True) -> dict[str, object]:
        """Return the message as templates know it: under the two names in use for thoughts, and with the arguments of
        calls `parsed` or as texts."""
        found: dict[str, object] = {"role": self.role, "content": self.content}
        if self.thinking:
            found |= {"reasoning_content": self.thinking, "thinking": self.thinking}
        if self.tool_calls:
            found["tool_calls"] = [call.fields(parsed=parsed) for call in self.tool_calls]
        return found | ({"tool_call_id": self.call_id, "name": self.name} if self.role == "tool" else {})


RESERVED = frozenset(
    ("messages", "tools", "tool_choice", "functions", "function_call", "bos_token", "eos_token",
     "add_generation_prompt", "raise_exception", "strftime_now")
)  # fmt: skip
"""Variables of a template that no caller sets."""


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
        known = {token for token in {*ids.tolist()} if self.is_control(token)}
        return [token for token in ids.tolist() if token in known] if known else []


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, template: Template, bos: str, eos: str, tokenizer: Tokenizer, model: str) -> None:
        """Set up; `bos` and `eos` are the texts of those tokens, `model` the name for messages."""
        self._template, self._tokenizer, self._model = template, tokenizer, model
        self._bos, self._eos = bos, eos

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise InvalidOption where the template does not read one of the `arguments`, or callers do not set it."""
        if not arguments:
            return
        known = [name for name in self._template.arguments() if name not in RESERVED]
        if unknown := sorted(set(arguments) - set(known)):
            raise InvalidOption(
                f"{unknown[0]!r} is not an argument of the chat template of {self._model}.",
                f"It reads {', '.join(known)}." if known else "It reads none; leave it out.",
            )

    def prompt(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, object] = MappingProxyType({}),
        most: int | None = None,
        should_stop: ShouldStop = never,
    ) -> Ids:
        """Return the ids of the rendered conversation, shape (n,), with the opening of the assistant's turn at the end.

        `arguments` are given to the template; those that it does not read have no effect.

        Raises:
            InvalidOption: an unknown role, no message, text that the template would turn into control tokens, or an
                argument that cannot be written as JSON.
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
        render = partial(self._render, arguments)
        calls = any(message.tool_calls for message in messages)
        try:
            plain = render(messages)
        except ModelUnsupported:
            merged = _without_system(messages)
            if merged is not None:
                messages, plain = merged, render(merged)
            elif calls:
                render = partial(self._render, arguments, parsed=False)
                plain = render(messages)
            else:
                raise
        self._tokenizer.check_length(plain, most)

        def encode(text: str, special: bool) -> Ids:
            return self._tokenizer.encode(text, special, most, should_stop)

        if calls or arguments.get("tools"):
            self._check_tools(messages, arguments, encode)
        return self._tokenise(messages, plain, render, encode)

    def _check_tools(
        self, messages: Sequence[Message], arguments: Mapping[str, object], encode: Callable[[str, bool], Ids]
    ) -> None:
        """Raise InvalidOption where tools or calls would become control tokens: without the characters that those are
        made of, the conversation must have the same."""
        empty = _with_texts(messages, [_OPEN if text else "" for m in messages for text in (m.content, m.thinking)])
        harmless = [
            replace(m, tool_calls=tuple(
                replace(call, name=_harmless(call.name), arguments=json.dumps(_harmless(json.loads(call.arguments))))
                for call in m.tool_calls
            ))
            for m in empty
        ]  # fmt: skip
        controls = [
            self._tokenizer.controls(encode(self._render({**arguments, "tools": tools}, turns), True))
            for tools, turns in ((arguments.get("tools"), empty), (_harmless(arguments.get("tools")), harmless))
        ]
        if controls[0] != controls[1]:
            raise InvalidOption(
                f"A tool, or the call of one, contains control tokens of {self._model}.",
                "Remove texts such as <|...|> from names, descriptions and arguments.",
            )

    def _tokenise(
        self,
        messages: Sequence[Message],
        plain: str,
        render: Callable[[Sequence[Message]], str],
        encode: Callable[[str, bool], Ids],
    ) -> Ids:
        controls = self._tokenizer.controls
        contents = [text for m in messages for text in (m.content, m.thinking)]
        holders = [f"{_OPEN}{i}{_CLOSE}" if i % 2 == 0 or text else "" for i, text in enumerate(contents)]
        skeleton = render(_with_texts(messages, holders))
        expected = controls(encode(skeleton, True))
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
        text = render(_with_texts(messages, [self._broken(text, mark, encode) for text in contents]))
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

    def _render(self, arguments: Mapping[str, object], messages: Sequence[Message], parsed: bool = True) -> str:
        return self._template.render([m.fields(parsed=parsed) for m in messages], self._bos, self._eos, arguments)

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the template describes the tools that it is given: it is tried, as names that a template reads may
        also be those of its macros' arguments."""
        name = "name_of_a_tool"
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        try:
            return name in self._render({"tools": [tool]}, [Message("user", "Hello")])
        except ModelUnsupported:
            return False


_MARKUP = re.compile(r"[<>|\[\]{}/\uff5c\u2581]")  # the last two are in DeepSeek's control tokens


def _harmless(value: object) -> Any:
    """Return JSON data without the characters that control tokens are made of."""
    if isinstance(value, str):
        return _MARKUP.sub("", value)
    if isinstance(value, Mapping):
        return {_harmless(key): _harmless(one) for key, one in value.items()}
    return [_harmless(one) for one in value] if isinstance(value, (list, tuple)) else value


def _with_texts(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """Return the messages with other texts: of each message its content and its thought."""
    return [
        replace(m, content=content, thinking=thinking)
        for m, content, thinking in zip(messages, texts[::2], texts[1::2], strict=True)
    ]


def _without_system(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages with the system message moved into the first user message, for templates without a system
    role; None where the first two messages have other roles."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    return [Message("user", f"{messages[0].content}\n\n{messages[1].content}"), *messages[2:]]


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts)

"""The forms of a conversation for a chat template: unchanged, or else changed as little as needed.

Templates differ in what they allow, and many raise an error, or leave a message out without a word, where a
conversation is not as they expect. No word of a message is lost by a form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from edgellm.engine.chat.messages import Message, change_texts, plain_turns


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A conversation: its messages, with the arguments of calls `parsed` or as texts, and the tools, if there are any,
    as OpenAI's API describes them."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    parsed: bool = True

    def fields(self) -> list[dict[str, object]]:
        """Return the messages as templates know them."""
        return [message.fields(parsed=self.parsed) for message in self.messages]

    def changed(self, change: Callable[[str], str], value: Callable[[str], str] | None = None) -> TemplateInput:
        """Return the conversation with the texts of all messages and tools changed as by `Message.changed`."""
        messages = tuple(message.changed(change, value) for message in self.messages)
        return replace(self, messages=messages, tools=change_texts(self.tools, change))


def _with_short_ids(messages: Sequence[Message]) -> Iterator[Message]:
    numbers, known = count(1), dict[str, str]()
    for message in messages:
        known |= {call.id: f"call{next(numbers):05}" for call in message.tool_calls}
        calls = tuple(replace(call, id=known[call.id]) for call in message.tool_calls)
        yield replace(message, tool_calls=calls, call_id=known.get(message.call_id, message.call_id))


def _with_texts_apart(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message.tool_calls and message.content.strip():
            yield replace(message, thinking="", tool_calls=())
        yield replace(message, content="") if message.tool_calls else message


def _with_single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield each call in a turn of its own, and its result after it."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        end = next((i for i in range(at, len(messages)) if messages[i].role != "tool"), len(messages))
        results, at = list(messages[at:end]), end
        for number, call in enumerate(message.tool_calls):
            yield replace(message, tool_calls=(call,)) if not number else Message("assistant", "", tool_calls=(call,))
            last = number == len(message.tool_calls) - 1
            own = [result for result in results if last or result.call_id == call.id]
            yield from own
            results = [result for result in results if result not in own]


def _with_one_system_message(messages: Sequence[Message]) -> Iterator[Message]:
    texts = [message.content for message in messages if message.role == "system"]
    if texts:
        yield Message("system", "\n\n".join(text for text in texts if text.strip()))
    yield from (message for message in messages if message.role != "system")


def _with_system_in_first_question(messages: Sequence[Message]) -> Iterator[Message]:
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    turns = [message for message in messages if message.role != "system"]
    first = next((number for number, message in enumerate(turns) if message.role == "user"), None)
    if system and first is None:
        yield Message("user", system)
    for number, message in enumerate(turns):
        yield replace(message, content=f"{system}\n\n{message.content}") if system and number == first else message


def _alternating(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with user and assistant in turn: consecutive turns of one role are joined."""
    last: Message | None = None
    for message in messages:
        if message.role == "system":
            yield message
            continue
        joins = last is not None and message.role == last.role != "tool"
        if last is not None and joins and not (message.tool_calls or last.tool_calls):
            content = "\n\n".join(text for text in (last.content, message.content) if text.strip())
            last = replace(last, content=content, thinking=last.thinking or message.thinking)
            continue
        if last is None and message.role != "user":
            yield Message("user", "")
        if last is not None:
            yield last
            if last.role == "tool" and message.role == "user":
                yield Message("assistant", "")
        last = message
    if last is not None:
        yield last


def _without_calls(messages: Sequence[Message]) -> Iterator[Message]:
    return _alternating([message for message in plain_turns(messages) if message.content.strip()])


Change: TypeAlias = Callable[[TemplateInput], TemplateInput]


def _with_whole_tools(conversation: TemplateInput) -> TemplateInput:
    """Return the conversation with all fields of its tools that OpenAI's API lets callers leave out."""

    def whole(function: Mapping[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", **(function.get("parameters") or {})}
        given = schema.get("properties")
        properties = {
            name: {"description": "", **one} if isinstance(one, Mapping) else one
            for name, one in (given.items() if isinstance(given, Mapping) else ())
        }
        return {"description": "", **function, "parameters": {**schema, "properties": properties}}

    tools = [{**tool, "function": whole(tool["function"])} for tool in conversation.tools or ()]
    return replace(conversation, tools=tools)


def _on_messages(change: Callable[[Sequence[Message]], Iterator[Message]]) -> Change:
    return lambda conversation: replace(conversation, messages=tuple(change(conversation.messages)))


FORMS: tuple[tuple[str, Change], ...] = (
    ("Tools are a list, each with a description and parameters.", _with_whole_tools),
    ("The ids of calls have nine letters and digits.", _on_messages(_with_short_ids)),
    ("The arguments of calls are texts.", lambda conversation: replace(conversation, parsed=False)),
    ("A text beside a call is a turn of its own.", _on_messages(_with_texts_apart)),
    ("Calls that were made at once follow each other.", _on_messages(_with_single_calls)),
    ("The system messages are joined at the beginning.", _on_messages(_with_one_system_message)),
    ("The system messages are in the first question.", _on_messages(_with_system_in_first_question)),
    ("Turns of the user and of the assistant alternate.", _on_messages(_alternating)),
    ("Calls and their results are texts.", _on_messages(_without_calls)),
)
"""Changes to a conversation, each with its message: the change that a model notices least comes first."""

"""The messages of a conversation, with the calls of tools and their results, and a model's chat template: a program
that writes them as one text.

It is a stranger's program. A child process (`edgellm.isolation.template_sandbox`) runs Jinja's own sandbox within
the system's limits, and is kept for the next conversation. A template in KNOWN is rendered in this process by the same
function: we have written it, and it takes time and memory in proportion to the conversation. So the bundled pair waits
for no second Python, which takes 80 ms of a core to start. Another model's child starts while the model loads. The
child adds about 0.4 ms to a rendering, however long the conversation.

Templates differ in what they allow, and many raise an error, or leave a message out without a word, where a
conversation is not as they expect. So there are forms that change it as little as needed, and lose no word.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported
from edgellm.isolation.child import Child, ChildFailed, ChildKind, Limits
from edgellm.isolation.template_sandbox import ANSWERS, MEMORY, MEMORY_PER_BYTE, SECONDS, describe

KNOWN = frozenset({"6b336c08d92c5d40ca5f840ba10c40952a20d3b9c58bf8de920ed04fd703cc9b"})
"""SHA-256 of harmless templates: the bundled pair's."""
MOST_SOURCE = 2**16  # characters of a template; known templates have 20,000 at most
_ANSWER, _ANSWER_PER_BYTE = 2**20, 16  # bytes of a rendered text: once, and for each byte of the conversation
KIND = ChildKind("edgellm.isolation.template_sandbox", "renders chat templates")
T = TypeVar("T")
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")  # variables for Python's start, and the date


class TemplateRaised(ModelUnsupported):
    """A chat template does not want the conversation as it is."""


class TemplateRenderer:
    """The chat template of a `model`, which makes texts of conversations; several threads may use it, by turns."""

    def __init__(self, source: str, model: str) -> None:
        """Set up; `model` is the name for messages. Nothing is compiled yet, and no process started."""
        self.source, self.model = source, model
        self._is_known = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in KNOWN
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child process, if needed, without waiting for it. If that fails, the first rendering says why."""
        if not self._is_known:
            with self._lock, suppress(EngineFailed):
                self._child.start()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        bos: str,
        eos: str,
        arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text, followed by the opening of the assistant's turn. `arguments` are further
        variables of the template. Raises ModelUnsupported: the template is not valid Jinja, or too long, or it fails,
        or takes more than its limits; InvalidOption: an argument cannot be written as JSON; EngineFailed: the child
        process could not be started, or was ended from outside."""
        conversation = {**arguments, "messages": messages, "bos_token": bos, "eos_token": eos}
        try:
            asked = json.dumps((self.source, conversation)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(
                f"An argument of the chat template cannot be written as JSON: {error}.", "Give plain values."
            ) from None
        try:
            return str(self._ask("render", asked), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self._refused(str(error)) from None

    @cached_property
    def arguments(self) -> Sequence[str]:
        """The names of the arguments that the template reads, sorted."""
        names = self._ask("arguments", self.source.encode("utf-8", "surrogatepass"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused("its arguments are unknown")  # nothing is taken for granted about the child
        return names

    def _ask(self, name: str, data: bytes) -> Any:
        """Return an answer to the bytes of a question: this process's for a known template, else the child's."""
        if self._is_known:
            try:
                return ANSWERS[name](data)
            except Exception as error:  # noqa: BLE001  as in the child
                raise self._refused(describe(error), TemplateRaised) from None
        if len(self.source) > MOST_SOURCE:
            raise self._refused(f"it has {len(self.source)} characters; at most {MOST_SOURCE} are allowed")
        size = len(data)
        limits = Limits(_ANSWER + _ANSWER_PER_BYTE * size, SECONDS, MEMORY + MEMORY_PER_BYTE * size)
        try:
            with self._lock:
                answer = self._child.call(name, limits, data)
        except ChildFailed as error:
            raise self._refused(str(error)) from None
        except ModelUnsupported as error:
            raise self._refused(error.what, TemplateRaised) from None
        return answer.value if name == "arguments" else answer.data

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if "_child" in vars(self):
                self._child.close()

    @cached_property
    def _child(self) -> Child:
        kept = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
        return Child(KIND, environment=kept)

    def _refused(self, why: str, kind: type[ModelUnsupported] = ModelUnsupported) -> ModelUnsupported:
        return kind(
            f"The chat template of {self.model} fails: {why}.",
            "Change the conversation (roles may have to alternate), or use another model.",
        )


ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of a function: its name, its `arguments` as JSON, and an id that its result refers to."""

    name: str
    arguments: str
    id: str = ""

    def values(self) -> dict[str, Any]:
        """Return the arguments by name; text that is no JSON object, as of a call that broke off, is the only value."""
        found = self._object()
        return {"arguments": self.arguments} if found is None else found[1]

    def text(self) -> str:
        """Return `values` as JSON: a JSON object as it was written, but for one that a client has written again without
        blanks, as JavaScript does. Models write blanks, and what they wrote need not be read again."""
        text, values = self._object() or ("", self.values())
        compact = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        return text if text and text != compact else json.dumps(values, ensure_ascii=False)

    def _object(self) -> tuple[str, dict[str, Any]] | None:
        """Return the written JSON object, as a text and as values; None if it is none."""
        text = self.arguments or "{}"
        for _ in range(2):  # some clients send the JSON of a text that is the JSON of an object
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                return None
            if isinstance(found, dict) or found is None:
                return ("{}", {}) if found is None else (text, found)
            if not isinstance(found, str):
                return None
            text = found
        return None

    def fields(self, *, parsed: bool = True) -> dict[str, object]:
        """Return the call as templates know it; most take the arguments `parsed`, and some as a text."""
        arguments: object = self.values() if parsed else self.text()
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is `system`, `user`, `assistant` or `tool`. `thinking` is the thought before
    an assistant's `content`; most templates leave it out of earlier turns. `tool_calls` are an assistant's; the result
    of a call is the content of a turn of `tool`, with the call's `call_id` and the function's `name`. `context` are
    texts that a user's question is about, which `whole` puts before it. An assistant's last turn may be `continued`."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    context: tuple[str, ...] = ()
    continued: bool = False

    def whole(self) -> "Message":
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

    def changed(self, change: Callable[[str], str], value: Callable[[str], str] | None = None) -> "Message":
        """Return the message with `change` applied to all its texts but the role; `value`, if given, is applied to the
        content and to the texts within the arguments of calls instead."""
        value = value or change
        calls = tuple(
            ToolCall(change(call.name), json.dumps(values, ensure_ascii=False), change(call.id))
            for call in self.tool_calls
            for values in [change_texts(call.values(), value, change)]
        )
        return Message(
            self.role, value(self.content), change(self.thinking), calls, change(self.call_id), change(self.name)
        )


def change_texts(data: Any, change: Callable[[str], str], key: Callable[[str], str] | None = None) -> Any:
    """Return JSON data with `change` applied to each text within, and `key`, by default the same, to the names."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {(key or change)(name): change_texts(value, change, key) for name, value in data.items()}
    return [change_texts(one, change, key) for one in data] if isinstance(data, (list, tuple)) else data


def with_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages, each result with the id and the name of its call: the call with its id, else the next call
    without a result, first by its name."""
    waiting: list[ToolCall] = []
    done: dict[str, ToolCall] = {}
    for message in messages:
        waiting += message.tool_calls
        fitting = [call for call in waiting if call.id == message.call_id]
        fitting = fitting or ([done[message.call_id]] if message.call_id in done else waiting)
        if message.role != "tool" or not fitting:
            yield message
            continue
        call = next((call for call in fitting if call.name == message.name), fitting[0])
        waiting = [one for one in waiting if one is not call]
        done[call.id] = call
        yield replace(message, call_id=call.id, name=message.name or call.name)


def plain_turns(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose calls and results are texts, for templates that know neither."""
    turns: list[Message] = []
    for message in messages:
        if message.tool_calls:
            calls = (f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.text()}}}</tool_call>'
                     for call in message.tool_calls)  # fmt: skip
            text = "\n".join((*([message.content] if message.content else []), *calls))
            turns.append(replace(message, content=text, tool_calls=()))
        elif message.role == "tool":
            text = f"<tool_response>{message.content}</tool_response>"
            if turns and turns[-1].role == "user" and turns[-1].content.startswith("<tool_response>"):
                turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n{text}")
            else:
                turns.append(Message("user", text))
        else:
            turns.append(message)
    return turns


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

    def changed(self, change: Callable[[str], str], value: Callable[[str], str] | None = None) -> "TemplateInput":
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

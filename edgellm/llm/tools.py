"""Tools: how each family of models writes its calls, and the calls of a reply told apart from its text.

The family is known by its chat template, which also describes the tools to the model. A model whose template has no
tools gets them in a system message instead, with the format that most families use; that works with any model that
follows instructions, and clients need not know which does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from edgellm.engine import Message, Model, ToolCall
from edgellm.errors import InvalidOption
from edgellm.spec.params import ANY_TOOL, ReplyOptions
from edgellm.spec.stream import Utf8
from edgellm.spec.types import Channel, Token

Tool: TypeAlias = Mapping[str, Any]
"""A function as OpenAI's API describes it: `{"type": "function", "function": {"name", "description", ...}}`."""
Parsed: TypeAlias = tuple[list[ToolCall], str]
"""The calls at the beginning of a text, and the rest, in which the next one may be incomplete."""

_DECODER = json.JSONDecoder()
_GENERIC = """You can call functions. They are described here, one JSON object per line:
{tools}
To call functions, write nothing but one line for each call, in this form:
<tool_call>{{"name": "NAME", "arguments": {{...}}}}</tool_call>
The results come in the next message. Answer in plain text if no function is needed."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    The first of `openings` begins them. `parse` is given the text from there on, and the tools by name. With `leading`,
    an opening counts only at the beginning of the answer. `everywhere`: calls are written in a channel of their own, so
    the whole reply is looked through. `forced` opens a call of a given function. `closing` matches what may follow a
    call and belongs to no text. `objects` precedes a call that is one JSON object, with its arguments under the name
    `arguments`; None where calls are not written so. `json_arguments`: nothing but the arguments, as JSON, has to
    follow what `forced` opens.
    """

    openings: tuple[str, ...]
    parse: Callable[[str, Mapping[str, Tool]], Parsed]
    forced: str
    closing: re.Pattern[str]
    objects: str | None = None
    arguments: str = "arguments"
    json_arguments: bool = False
    leading: bool = False
    everywhere: bool = False


def _object(text: str) -> tuple[dict[str, Any], str] | None:
    """Return the JSON object that `text` begins with, and what follows; None where there is none, or not all of it."""
    try:
        found, end = _DECODER.raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return (found, text.lstrip()[end:]) if isinstance(found, dict) else None


def _call(found: Mapping[str, Any]) -> ToolCall | None:
    """Return the call that a JSON object describes."""
    function = found.get("function")
    found = function if isinstance(function, dict) else found
    name = found.get("name", function if isinstance(function, str) else None)
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, written, _id())


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _tagged(text: str, _tools: Mapping[str, Tool]) -> Parsed:
    """Hermes and Qwen: `<tool_call>` around a JSON object."""
    calls: list[ToolCall] = []
    while (at := text.find("<tool_call>")) >= 0 and (found := _object(text[at + 11 :])) is not None:
        if (call := _call(found[0])) is None:
            break
        calls.append(call)
        text = found[1]
    return calls, text


_FUNCTION = re.compile(
    r"\s*(?:</tool_call>)?\s*(?:<tool_call>)?\s*<function=([^>\n]+)>(.*?)</function>\s*(?:</tool_call>)?\s*", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml(text: str, tools: Mapping[str, Tool]) -> Parsed:
    """Qwen3-Coder and Qwen3.5: `<function=NAME>` around `<parameter=NAME>` with the value as it is."""
    calls: list[ToolCall] = []
    while found := _FUNCTION.match(text):
        name = found[1].strip()
        values = {key.strip(): _typed(value, _schema(tools, name, key.strip())) for key, value in
                  _PARAMETER.findall(found[2])}  # fmt: skip
        calls.append(ToolCall(name, json.dumps(values, ensure_ascii=False), _id()))
        text = text[found.end() :]
    return calls, text


_PAIRS = re.compile(r"\s*(?:</tool_call>)?\s*<tool_call>\s*([\w.-]+)(.*?)</tool_call>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL)


def _pairs(text: str, tools: Mapping[str, Tool]) -> Parsed:
    """GLM: the name, then `<arg_key>` and `<arg_value>` in turn."""
    calls: list[ToolCall] = []
    while found := _PAIRS.match(text):
        values = {key.strip(): _typed(value, _schema(tools, found[1], key.strip())) for key, value in
                  _PAIR.findall(found[2])}  # fmt: skip
        calls.append(ToolCall(found[1], json.dumps(values, ensure_ascii=False), _id()))
        text = text[found.end() :]
    return calls, text


def _schema(tools: Mapping[str, Tool], name: str, parameter: str) -> Mapping[str, Any]:
    """Return the schema of a function's parameter; empty if it is not known."""
    schema: Any = tools.get(name, {})
    for key in ("function", "parameters", "properties", parameter):
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _typed(value: str, schema: Mapping[str, Any]) -> object:
    """Return a value that was written without quotation marks, as its schema has it."""
    kinds = schema.get("type", ())
    if "string" in ([kinds] if isinstance(kinds, str) else kinds):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _bare(text: str, tools: Mapping[str, Tool]) -> Parsed:
    """Llama 3: a JSON object and nothing else, perhaps after `<|python_tag|>`; several with semicolons between."""
    calls: list[ToolCall] = []
    while (found := _object(text.lstrip("; \n").removeprefix("<|python_tag|>"))) is not None:
        call = _call(found[0])
        if call is None or call.name not in tools:
            break
        calls.append(call)
        text = found[1]
    return calls, text


_MISTRAL = re.compile(r"\s*\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\s*\{)")


def _mistral(text: str, _tools: Mapping[str, Tool]) -> Parsed:
    """Mistral: `[TOOL_CALLS]` before an array of objects, or, since 2025, before each name and its arguments."""
    calls: list[ToolCall] = []
    while (found := _MISTRAL.match(text)) and (arguments := _object(text[found.end() :])) is not None:
        calls.append(ToolCall(found[1], json.dumps(arguments[0], ensure_ascii=False), _id()))
        text = arguments[1]
    if calls:
        return calls, text
    try:
        listed, end = _DECODER.raw_decode(text.strip().removeprefix("[TOOL_CALLS]").lstrip())
    except (ValueError, RecursionError):
        return [], text
    made = [_call(one) for one in (listed if isinstance(listed, list) else [listed]) if isinstance(one, dict)]
    calls = [call for call in made if call is not None]
    return (calls, text.strip().removeprefix("[TOOL_CALLS]").lstrip()[end:]) if calls else ([], text)


_HARMONY = re.compile(
    r"\s*(?:<\|call\|>|<\|end\|>)?\s*(?:<\|start\|>\s*assistant)?[^{]*?\bto=(?:functions\.)?([\w.-]+)[^{]*?<\|message\|>(?=\s*\{)",
    re.DOTALL,
)


def _harmony(text: str, _tools: Mapping[str, Tool]) -> Parsed:
    """gpt-oss: a message to `functions.NAME` in the channel `commentary`."""
    calls: list[ToolCall] = []
    while (found := _HARMONY.match(text)) and (arguments := _object(text[found.end() :])) is not None:
        calls.append(ToolCall(found[1], json.dumps(arguments[0], ensure_ascii=False), _id()))
        text = arguments[1]
    return calls, text


_DEEPSEEK = re.compile(
    r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*"
    r"(?:```json)?(?=\s*\{)"
)


def _deepseek(text: str, _tools: Mapping[str, Tool]) -> Parsed:
    """DeepSeek V3, R1 and V3.1: the name, and JSON in a fence or without one, between control tokens."""
    calls: list[ToolCall] = []
    while (found := _DEEPSEEK.match(text)) and (arguments := _object(text[found.end() :])) is not None:
        calls.append(ToolCall(found[1], json.dumps(arguments[0], ensure_ascii=False), _id()))
        text = arguments[1]
    return calls, text


_GEMMA = re.compile(r"\s*<\|tool_call>\s*call:([\w.-]+)(\{.*?\})\s*<tool_call\|>\s*", re.DOTALL)
_GEMMA_PART = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_]\w*)(?=\s*:)', re.DOTALL)


def _gemma(text: str, _tools: Mapping[str, Tool]) -> Parsed:
    """Gemma 4: `call:NAME{key:value}`, where `<|"|>` are the quotation marks of texts, and keys have none."""
    calls: list[ToolCall] = []
    while found := _GEMMA.match(text):
        written = _GEMMA_PART.sub(lambda part: json.dumps(part[2] or part[1] or "", ensure_ascii=False), found[2])
        read = _object(written)
        if read is None:
            break
        calls.append(ToolCall(found[1], json.dumps(read[0], ensure_ascii=False), _id()))
        text = text[found.end() :]
    return calls, text


_TAG_END = re.compile(r"\s*(?:</tool_call>)?\s*")
_TAGGED = ToolFormat(
    ("<tool_call>",), _tagged, '<tool_call>\n{{"name": "{name}", "arguments": ', _TAG_END, objects="<tool_call>\n"
)
_LIST_END = re.compile(r"\s*\]?\s*")
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁calls▁end｜>)?\s*")
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "commentary"),
     ToolFormat(("to=functions.",), _harmony, "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                re.compile(r"\s*(?:<\|call\|>|<\|end\|>)?\s*"), everywhere=True, json_arguments=True)),
    (("<|tool_call>",),
     ToolFormat(("<|tool_call>",), _gemma, "<|tool_call>call:{name}{{", re.compile(r"\s*(?:<tool_call\|>)?\s*"))),
    (("[TOOL_CALLS]", "[ARGS]"), ToolFormat(("[TOOL_CALLS]",), _mistral, "[TOOL_CALLS]{name}[ARGS]", _LIST_END,
                json_arguments=True)),
    (("[TOOL_CALLS]",),
     ToolFormat(("[TOOL_CALLS]",), _mistral, '[TOOL_CALLS][{{"name": "{name}", "arguments": ', _LIST_END,
                objects="[TOOL_CALLS]")),
    ((_DEEPSEEK_BEGIN, "```json"),
     ToolFormat((_DEEPSEEK_BEGIN,), _deepseek,
                _DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", _DEEPSEEK_END,
                json_arguments=True)),
    ((_DEEPSEEK_BEGIN,),
     ToolFormat((_DEEPSEEK_BEGIN,), _deepseek, _DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
                _DEEPSEEK_END, json_arguments=True)),
    (("<function=", "<parameter="),
     ToolFormat(("<tool_call>", "<function="), _xml, "<tool_call>\n<function={name}>\n", _TAG_END)),
    (("<tool_call>", "<arg_key>"), ToolFormat(("<tool_call>",), _pairs, "<tool_call>{name}\n", _TAG_END)),
    (("<tool_call>",), _TAGGED),
    (('"parameters"', "ipython"),
     ToolFormat(("<|python_tag|>", "{"), _bare, '{{"name": "{name}", "parameters": ', re.compile(r"\s*;?\s*"),
                leading=True, objects="", arguments="parameters")),
)  # fmt: skip
"""Texts in a chat template, and the format that they show. The first match counts."""


def find_format(template: str, describes_tools: bool) -> ToolFormat | None:
    """Return the format that a chat `template` shows; None if it has no tools, or shows none that is known."""
    if not describes_tools:
        return None
    return next((known for signs, known in _FORMATS if all(sign in template for sign in signs)), None)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, and the model's format for calls.

    `generic`: the model's template knows none, so they are described in a system message. `choice` names the function
    that must be called, or is ANY_TOOL; None: the model decides. `constrained`: a call that must come follows `schema`.
    """

    tools: tuple[Tool, ...]
    format: ToolFormat
    generic: bool
    choice: str | None = None
    constrained: bool = False

    @classmethod
    def of(cls, model: Model, options: ReplyOptions, *, grammars: bool) -> Toolbox:
        """Return the tools of `options` as `model` is told of them. `grammars`: whatever chooses the tokens applies
        grammars. Raise InvalidOption where any of several tools must be called, and no grammar can demand it."""
        found = find_format(model.chat_template_source, model.describes_tools)
        made = cls(options.tools, found or _TAGGED, found is None, options.tool_choice, grammars)
        if (schema := made.schema()) is not None:
            try:
                model.grammar(schema)
                return made
            except InvalidOption:
                """One of the tools has parameters that no grammar describes."""
        names = made.chosen()
        if len(names) > 1:
            raise InvalidOption(
                f"tool_choice asks for a call of any of {len(names)} tools, and no grammar of such calls is available:"
                f" {made.missing(grammars)}.",
                "Name one of the tools, or leave the choice to the model.",
            )
        return replace(made, choice=names[0] if names else None, constrained=False)

    def missing(self, grammars: bool) -> str:
        """Return why no grammar describes the calls; `grammars` as for `of`."""
        if not grammars:
            return "the verifier applies none"
        if self.format.objects is None:
            return "the model does not write its calls as JSON objects"
        return "the parameters of a tool have a schema that cannot be used"

    def chosen(self) -> list[str]:
        """Return the names of the functions of which one must be called; none where the model decides."""
        if self.choice is None:
            return []
        return [str(tool["function"]["name"]) for tool in self.tools] if self.choice == ANY_TOOL else [self.choice]

    def schema(self) -> str | None:
        """Return the JSON schema of what follows `opening`; None where nothing is demanded, or no schema describes
        it."""
        chosen = set(self.chosen())
        if not (self.constrained and chosen):
            return None
        tools = [tool["function"] for tool in self.tools if tool["function"]["name"] in chosen]
        parameters = {one["name"]: one.get("parameters") or {"type": "object"} for one in tools}
        style = self.format
        if style.objects is None:
            return json.dumps(parameters[tools[0]["name"]]) if style.json_arguments and len(tools) == 1 else None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, style.arguments: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", style.arguments],
                "additionalProperties": False,
            }
            for name in parameters
        ]
        return json.dumps(
            {"anyOf": calls, "$defs": {name: _moved(one, f"#/$defs/{name}") for name, one in parameters.items()}}
        )

    def arguments(self) -> dict[str, object]:
        """Return the arguments for the chat template."""
        return {} if self.generic else {"tools": list(self.tools)}

    def opening(self) -> str:
        """Return the text that the reply begins with, so that it is a call; empty where the model decides."""
        if not (chosen := self.chosen()):
            return ""
        if self.constrained and self.format.objects is not None:
            return self.format.objects
        return self.format.forced.format(name=chosen[0])

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation for the chat template: as it is, or in the form of a template without tools."""
        if not self.generic:
            return list(messages)
        described = _GENERIC.format(tools="\n".join(json.dumps(tool["function"]) for tool in self.tools))
        plain = plain_turns(messages)
        if plain and plain[0].role == "system":
            return [replace(plain[0], content=f"{plain[0].content}\n\n{described}"), *plain[1:]]
        return [Message("system", described), *plain]


def _moved(schema: Any, to: str) -> Any:
    """Return a JSON schema whose references hold where it lies at `to` in another one."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, to) for key, value in schema.items()}
        reference = schema.get("$ref")
        return moved | {"$ref": to + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else moved
    return [_moved(one, to) for one in schema] if isinstance(schema, list) else schema


def plain_turns(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose calls and results are texts, for templates that know neither."""
    turns: list[Message] = []
    for message in messages:
        if message.tool_calls:
            calls = (f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'
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


def split_calls(
    tokens: Iterable[Token], toolbox: Toolbox, text_of: Callable[[int], bytes]
) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply and its calls, each as soon as it is complete. The calls' tokens have no text.

    `text_of` returns the bytes of a token, of control tokens too. Tokens whose text may begin a call are held back.
    What looks like a call and cannot be read is yielded as text at the end.
    """
    style, tools = toolbox.format, {str(tool["function"]["name"]): tool for tool in toolbox.tools}
    openings = [opening.encode() for opening in style.openings]
    held: list[tuple[Token, bytes]] = []
    calling, started = bool(toolbox.opening()), False
    buffer, decoder, called = toolbox.opening(), Utf8(), False
    last: Token | None = None
    for token in tokens:
        raw = text_of(token.id) if style.everywhere else token.piece or text_of(token.id)
        if not style.everywhere and token.channel is not Channel.ANSWER:
            yield token
            continue
        last = token
        if calling:
            buffer += decoder.feed(raw)
            yield replace(token, piece=b"")
            calls, rest = style.parse(buffer, tools)
            yield from calls
            called = called or bool(calls)
            buffer = rest if calls else buffer
            continue
        held.append((token, raw))
        text = b"".join(part for _, part in held)
        at = _opening(text, openings, leading=style.leading and started)
        if at is not None:
            calling, buffer = True, decoder.feed(text if style.everywhere else text[at:])
            for one, part in held:
                yield replace(one, piece=b"" if style.everywhere else one.piece[: max(0, at)])
                at -= len(part)
            held = []
            continue
        keep = 0 if style.leading and started else _pending(text, openings, style)
        while held and len(text) - len(held[0][1]) >= keep:
            text = text[len(held[0][1]) :]
            one, part = held.pop(0)
            started = started or bool(part.strip())
            yield one
    for one, _ in held:
        yield one
    if calling and last is not None:
        calls, rest = style.parse(buffer + decoder.end(), tools)
        yield from calls
        called = called or bool(calls)
        rest = style.closing.sub("", rest, count=1) if called else rest
        if rest.strip() not in ("", toolbox.opening().strip()) and not (style.everywhere and called):
            yield replace(last, piece=rest.encode())


def _opening(text: bytes, openings: Sequence[bytes], *, leading: bool) -> int | None:
    """Return where calls begin in `text`; with `leading` there are none any more."""
    if leading:
        return None
    if b"{" in openings:  # only at the beginning of the answer
        blanks = len(text) - len(text.lstrip())
        return blanks if any(map(text.lstrip().startswith, openings)) else None
    found = [at for opening in openings if (at := text.find(opening)) >= 0]
    return min(found, default=None)


def _pending(text: bytes, openings: Sequence[bytes], style: ToolFormat) -> int:
    """Return how many bytes at the end of `text` may belong to the beginning of a call."""
    if style.everywhere:  # the header before the opening belongs to the call
        after = text.rfind(b"<|message|>")
        starts = [at for name in (b"<|start|>", b"<|channel|>") if (at := text.find(name, max(after, 0))) >= 0]
        return len(text) - min(starts, default=len(text))
    if style.leading and not text.strip():
        return len(text)
    most = min(len(text), max(map(len, openings)) - 1)
    return next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in openings)), 0)

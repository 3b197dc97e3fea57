"""The tools of a request in the form of the model, and the calls of a reply told apart from its text.

The family is known by its chat template, which also describes the tools to the model. A model whose template has no
tools gets a system message instead, with the format of most families; that works with any model that follows
instructions, and clients need not know the difference.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.engine import Message, Model, ToolCall
from edgellm.engine.chat.template import plain_turns
from edgellm.engine.grammar.json_schema import without_descriptions
from edgellm.errors import InvalidOption
from edgellm.llm.tools.markup import CLOSED, Parse, bare, deepseek, gemma, harmony, mistral, pairs, tagged, xml
from edgellm.llm.tools.values import Tool
from edgellm.spec.params import ANY_TOOL, ReplyOptions
from edgellm.spec.stream import Utf8, held_bytes
from edgellm.spec.types import Channel, Token


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls by a family of models.

    The first of `openings` begins calls, "{" only at the beginning of the answer. `parse` is given the text from there
    on, and the tools by name. `forced` opens a call of a given function. `objects` precedes a call that is one JSON
    object, with its arguments under the name `arguments`; None in other formats. `json_arguments`: only the arguments,
    as JSON, follow `forced`. `everywhere`: calls have a channel of their own, so the whole reply is searched.
    """

    openings: tuple[str, ...]
    parse: Parse
    forced: str
    objects: str | None = None
    arguments: str = "arguments"
    json_arguments: bool = False
    everywhere: bool = False

    @property
    def leading(self) -> bool:
        """Return whether an opening counts only at the beginning of the answer."""
        return "{" in self.openings

    @property
    def whole(self) -> bool:
        """Return whether only the end of the reply tells where values end, so that no call is read before."""
        return self.objects is None and not self.json_arguments

    def schema(self, functions: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the JSON schema of a call of one of `functions`; None where no schema fits."""
        parameters = {one["name"]: one.get("parameters") or {"type": "object"} for one in functions}
        if self.objects is None:
            (one, *others) = parameters.values()
            return json.dumps(without_descriptions(one)) if self.json_arguments and not others else None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, self.arguments: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for name in parameters
        ]
        placed = {name: without_descriptions(one, f"#/$defs/{name}") for name, one in parameters.items()}
        return json.dumps({"anyOf": calls, "$defs": placed})


TAGGED = ToolFormat(("<tool_call>",), tagged, '<tool_call>\n{{"name": "{name}", "arguments": ', "<tool_call>\n")
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "commentary"),
     ToolFormat(("to=functions.",), harmony, "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                json_arguments=True, everywhere=True)),
    (("<|tool_call>",), ToolFormat(("<|tool_call>",), gemma, "<|tool_call>call:{name}{{")),
    (("[TOOL_CALLS]", "[ARGS]"),
     ToolFormat(("[TOOL_CALLS]",), mistral, "[TOOL_CALLS]{name}[ARGS]", json_arguments=True)),
    (("[TOOL_CALLS]",),
     ToolFormat(("[TOOL_CALLS]",), mistral, '[TOOL_CALLS][{{"name": "{name}", "arguments": ', "[TOOL_CALLS]")),
    ((_DEEPSEEK, "```json"),
     ToolFormat((_DEEPSEEK,), deepseek, _DEEPSEEK + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
                json_arguments=True)),
    ((_DEEPSEEK,),
     ToolFormat((_DEEPSEEK,), deepseek, _DEEPSEEK + "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", json_arguments=True)),
    (("<function=", "<parameter="),
     ToolFormat(("<tool_call>", "<function="), xml, "<tool_call>\n<function={name}>\n")),
    (("<tool_call>", "<arg_key>"), ToolFormat(("<tool_call>",), pairs, "<tool_call>{name}\n")),
    (("<tool_call>",), TAGGED),
    (('"parameters"', "ipython"),
     ToolFormat(("<|python_tag|>", "{"), bare, '{{"name": "{name}", "parameters": ', "", "parameters")),
)  # fmt: skip
"""Signs in a chat template, and their format. The first match counts."""


def find_format(template: str) -> ToolFormat | None:
    """Return the format of a chat `template` that describes tools; None without a known sign."""
    return next((known for signs, known in _FORMATS if all(sign in template for sign in signs)), None)


_GENERIC = """You can call functions. They are described here, one JSON object per line:
{tools}
To call functions, write nothing but one line for each call, in this form:
<tool_call>{{"name": "NAME", "arguments": {{...}}}}</tool_call>
The results come in the next message. Answer in plain text if no function is needed."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, and the model's format for calls.

    `generic`: the model's template has no tools, so a system message describes them. `chosen` names the functions of
    which one must be called; none: the model decides. A required call follows the JSON `schema` behind `opening`, if
    there is one.
    """

    tools: tuple[Tool, ...]
    format: ToolFormat
    generic: bool
    chosen: tuple[str, ...] = ()
    schema: str | None = None

    @classmethod
    def of(cls, model: Model, options: ReplyOptions, *, grammars: bool) -> "Toolbox":
        """Return the tools of `options` in the form of `model`. `grammars`: the verifier applies grammars. Raise
        InvalidOption if any of several tools must be called, and no grammar can demand that."""
        found = find_format(model.chat_template_source) if model.describes_tools else None
        style, choice, functions = found or TAGGED, options.tool_choice, [tool["function"] for tool in options.tools]
        functions = [one for one in functions if choice in (ANY_TOOL, one["name"])]
        schema, why = style.schema(functions) if functions and grammars else None, "the verifier applies none"
        if schema is not None:
            try:
                model.grammar(schema)
            except InvalidOption:
                schema, why = None, "the parameters of a tool have a schema that cannot be used"
        elif grammars:
            why = "the model does not write its calls as JSON objects"
        if schema is None and len(functions) > 1:
            raise InvalidOption(
                f"tool_choice asks for a call of any of {len(functions)} tools, and no grammar of such calls is"
                f" available: {why}.",
                "Name one of the tools, or leave the choice to the model.",
            )
        return cls(options.tools, style, found is None, tuple(str(one["name"]) for one in functions), schema)

    def arguments(self) -> dict[str, object]:
        """Return the arguments for the chat template."""
        return {"tools": list(self.tools)} if self.tools and not self.generic else {}

    def opening(self) -> str:
        """Return the beginning of a reply that must be a call; empty if the model decides."""
        if not self.chosen:
            return ""
        if self.schema is not None and self.format.objects is not None:
            return self.format.objects
        return self.format.forced.format(name=self.chosen[0])

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation for the chat template: as it is, or in the form of a template without tools."""
        if not self.generic:
            return list(messages)
        tools = [json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools]
        described = _GENERIC.format(tools="\n".join(tools))
        plain = plain_turns(messages)
        if plain and plain[0].role == "system":
            return [replace(plain[0], content=f"{plain[0].content}\n\n{described}"), *plain[1:]]
        return [Message("system", described), *plain]


def split_calls(
    tokens: Iterable[Token], toolbox: Toolbox, text_of: Callable[[int], bytes], cut: Callable[[], bool] = lambda: False
) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply and its calls, each as soon as it is certain. The calls' tokens have no text.

    `text_of` returns the bytes of a token, of control tokens too. `cut` returns, after the last token, whether the
    reply broke off: an open call is no call then. Tokens whose text may begin a call are held back. An unreadable call
    is yielded as text at the end.
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
            if not style.whole and (b"}" in raw or b"]" in raw):  # Calls in JSON end with a bracket.
                calls, rest = style.parse(buffer, tools, False)
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
        calls, rest = style.parse(buffer + decoder.end(), tools, not cut())
        yield from calls
        called = called or bool(calls)
        rest = CLOSED.sub("", rest, count=1) if called else rest
        if rest.strip() not in ("", toolbox.opening().strip()) and not (style.everywhere and called):
            yield replace(last, piece=rest.encode())


def _opening(text: bytes, openings: Sequence[bytes], *, leading: bool) -> int | None:
    """Return the beginning of calls in `text`, if any; with `leading` it is too late for calls."""
    if leading:
        return None
    if b"{" in openings:  # A bracket counts only at the beginning of the answer.
        blanks = len(text) - len(text.lstrip())
        return blanks if any(map(text.lstrip().startswith, openings)) else None
    found = [at for opening in openings if (at := text.find(opening)) >= 0]
    return min(found, default=None)


def _pending(text: bytes, openings: Sequence[bytes], style: ToolFormat) -> int:
    """Return how many bytes at the end of `text` may belong to the beginning of a call."""
    if style.everywhere:  # The header before the opening belongs to the call.
        after = text.rfind(b"<|message|>")
        starts = [at for name in (b"<|start|>", b"<|channel|>") if (at := text.find(name, max(after, 0))) >= 0]
        return len(text) - min(starts, default=len(text))
    if style.leading and not text.strip():
        return len(text)
    return held_bytes(openings, text)

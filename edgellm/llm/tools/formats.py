"""The formats in which families of models write calls, and how a chat template shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgellm.llm.tools.json_calls import Parse, bare, deepseek, gemma, harmony, mistral, tagged
from edgellm.llm.tools.tag_calls import pairs, xml


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    The first of `openings` begins them. `parse` is given the text from there on, and the tools by name. With `leading`,
    an opening counts only at the beginning of the answer. `everywhere`: calls are written in a channel of their own, so
    the whole reply is looked through. `forced` opens a call of a given function. `closing` matches what may follow a
    call and belongs to no text. `objects` precedes a call that is one JSON object, with its arguments under the name
    `arguments`; None where calls are not written so. `json_arguments`: nothing but the arguments, as JSON, has to
    follow what `forced` opens. `whole`: only the end of the reply tells where values end, so that
    no call is read before it.
    """

    openings: tuple[str, ...]
    parse: Parse
    forced: str
    closing: re.Pattern[str]
    objects: str | None = None
    arguments: str = "arguments"
    json_arguments: bool = False
    leading: bool = False
    everywhere: bool = False
    whole: bool = False


_TAG_END = re.compile(r"\s*(?:</tool_call>)?\s*")
TAGGED = ToolFormat(
    ("<tool_call>",), tagged, '<tool_call>\n{{"name": "{name}", "arguments": ', _TAG_END, objects="<tool_call>\n"
)
_LIST_END = re.compile(r"\s*\]?\s*")
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁calls▁end｜>)?\s*")
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "commentary"),
     ToolFormat(("to=functions.",), harmony, "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                re.compile(r"\s*(?:<\|call\|>|<\|end\|>)?\s*"), everywhere=True, json_arguments=True)),
    (("<|tool_call>",),
     ToolFormat(("<|tool_call>",), gemma, "<|tool_call>call:{name}{{", re.compile(r"\s*(?:<tool_call\|>)?\s*"),
                whole=True)),
    (("[TOOL_CALLS]", "[ARGS]"), ToolFormat(("[TOOL_CALLS]",), mistral, "[TOOL_CALLS]{name}[ARGS]", _LIST_END,
                json_arguments=True)),
    (("[TOOL_CALLS]",),
     ToolFormat(("[TOOL_CALLS]",), mistral, '[TOOL_CALLS][{{"name": "{name}", "arguments": ', _LIST_END,
                objects="[TOOL_CALLS]")),
    ((_DEEPSEEK_BEGIN, "```json"),
     ToolFormat((_DEEPSEEK_BEGIN,), deepseek,
                _DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", _DEEPSEEK_END,
                json_arguments=True)),
    ((_DEEPSEEK_BEGIN,),
     ToolFormat((_DEEPSEEK_BEGIN,), deepseek, _DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
                _DEEPSEEK_END, json_arguments=True)),
    (("<function=", "<parameter="),
     ToolFormat(("<tool_call>", "<function="), xml, "<tool_call>\n<function={name}>\n", _TAG_END,
                whole=True)),
    (("<tool_call>", "<arg_key>"), ToolFormat(("<tool_call>",), pairs, "<tool_call>{name}\n", _TAG_END, whole=True)),
    (("<tool_call>",), TAGGED),
    (('"parameters"', "ipython"),
     ToolFormat(("<|python_tag|>", "{"), bare, '{{"name": "{name}", "parameters": ', re.compile(r"\s*;?\s*"),
                leading=True, objects="", arguments="parameters")),
)  # fmt: skip
"""Texts in a chat template, and the format that they show. The first match counts."""


def find_format(template: str, describes_tools: bool) -> ToolFormat | None:
    """Return the format that a chat `template` shows; None if it has no tools, or shows none that is known."""
    if not describes_tools:
        return None
    return next((known for signs, known in _FORMATS if all(sign in template for sign in signs)), None)

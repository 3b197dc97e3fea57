"""The formats of calls by families of models, and their signs in chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgellm.llm.tools.json_calls import Parse, bare, deepseek, gemma, harmony, mistral, tagged
from edgellm.llm.tools.tag_calls import pairs, xml


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls by a family of models.

    The first of `openings` begins calls. `parse` is given the text from there on, and the tools by name. With
    `leading`, an opening counts only at the beginning of the answer. `everywhere`: calls have a channel of their own,
    so the whole reply is searched. `forced` opens a call of a given function. `closing` matches the markup after a
    call. `objects` precedes a call that is one JSON object, with its arguments under the name `arguments`; None in
    other formats. `json_arguments`: only the arguments, as JSON, follow `forced`. `whole`: only the end of the reply
    tells where values end, so that no call is read before.
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
"""Signs in a chat template, and their format. The first match counts."""


def find_format(template: str, describes_tools: bool) -> ToolFormat | None:
    """Return the format of a chat `template`; None without tools, or without a known sign."""
    if not describes_tools:
        return None
    return next((known for signs, known in _FORMATS if all(sign in template for sign in signs)), None)

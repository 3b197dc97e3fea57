"""Calls as Gemma 4 writes them: `call:NAME{key:value}`, with quotation marks of its own around texts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edgellm.engine import ToolCall
from edgellm.llm.tools.json_calls import Parsed, made
from edgellm.llm.tools.loose import CALL_END, LooseReader
from edgellm.llm.tools.schema import Schema, Tool

_HEAD = re.compile(r"\s*<\|tool_call>\s*call:\s*([^{}\n]+?)\s*(?=\{)")

_END = re.compile(rf"\s*(?:{CALL_END})?")


def gemma(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Read calls of Gemma 4, whose keys, and at times whose texts, have no quotation marks."""
    calls: list[ToolCall] = []
    while head := _HEAD.match(text):
        reader = LooseReader(text, bare=True, ended=ended)
        try:
            values, end = reader.value(head.end(), Schema.of(tools.get(head[1])))
        except (ValueError, RecursionError):
            break
        if (call := made(head[1], values)) is None:
            break
        calls.append(call)
        text = _END.sub("", text[end:], count=1)
    return calls, text

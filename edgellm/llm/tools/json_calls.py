"""Calls in JSON, with different markup in each family."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from edgellm.engine import ToolCall
from edgellm.llm.tools.values import CALL_END, LooseReader, Schema, Tool, read_loose
from edgellm.valid_json import read_json, valid_text, write_json

Parsed: TypeAlias = tuple[list[ToolCall], str]
"""The calls at the beginning of a text, and the rest, which may begin with an incomplete call."""
Parse: TypeAlias = Callable[[str, Mapping[str, Tool], bool], Parsed]
"""A reader of the calls in a text, with the tools by name. The flag tells that the text has ended, which closes open
brackets."""

_MAX_DEPTH = 100  # nested objects and lists in arguments: clients' readers take no more


def made(name: str, arguments: Mapping[str, Any]) -> ToolCall | None:
    """Return a call with arguments in valid JSON; None where these are nested too deep."""
    try:
        deep = _depth(arguments) > _MAX_DEPTH
        return None if deep else ToolCall(valid_text(name), write_json(arguments), f"call_{secrets.token_hex(12)}")
    except RecursionError:
        return None


def _repeated(text: str, read: Callable[[str], tuple[ToolCall | None, str] | None]) -> Parsed:
    """Return the calls that `read` finds one after the other: it returns the first one and the rest of the text."""
    calls: list[ToolCall] = []
    while (found := read(text)) is not None and found[0] is not None:
        calls.append(found[0])
        text = found[1]
    return calls, text


def headed(head: str) -> Parse:
    """Return the reader of calls whose arguments follow `head`, a pattern with the name in its first group."""
    pattern = re.compile(head + r"(?=\s*\{)", re.DOTALL)

    def parse(text: str, _tools: Mapping[str, Tool], ended: bool) -> Parsed:
        def read(text: str) -> tuple[ToolCall | None, str] | None:
            if (found := pattern.match(text)) is None or (given := _object(text[found.end() :], ended)) is None:
                return None
            return made(found[1].strip(), given[0]), given[1]

        return _repeated(text, read)

    return parse


def tagged(text: str, _tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Read calls of Hermes and Qwen: `<tool_call>` around a JSON object."""

    def read(text: str) -> tuple[ToolCall | None, str] | None:
        _, tag, behind = text.partition("<tool_call>")
        found = _object(behind, ended) if tag else None
        return None if found is None else (_call(found[0]), found[1])

    return _repeated(text, read)


def bare(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Read calls of Llama 3: JSON objects alone, separated by semicolons, perhaps after `<|python_tag|>`."""

    def read(text: str) -> tuple[ToolCall | None, str] | None:
        found = _object(text.lstrip("; \n").removeprefix("<|python_tag|>"), ended)
        call = None if found is None else _call(found[0])
        return None if found is None or call is None or call.name not in tools else (call, found[1])

    return _repeated(text, read)


_MISTRAL = headed(r"\s*\[TOOL_CALLS\]\s*([^\[\]{]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?")


def mistral(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Read calls of Mistral: `[TOOL_CALLS]` before an array of objects, since 2025 before each name and arguments."""
    calls, rest = _MISTRAL(text, tools, ended)
    if calls:
        return calls, rest
    listed = text.strip().removeprefix("[TOOL_CALLS]").lstrip()
    read = _value(listed, ended)
    if read is None:
        return [], text
    made_of = [_call(one) for one in (read[0] if isinstance(read[0], list) else [read[0]]) if isinstance(one, dict)]
    calls = [call for call in made_of if call is not None]
    return (calls, read[1]) if calls else ([], text)


harmony = headed(
    r"\s*(?:<\|call\|>|<\|end\|>)?\s*(?:<\|start\|>\s*assistant)?[^{]*?\bto=(?:functions\.)?([^\s<>{}]+)[^{]*?<\|message\|>"
)
"""gpt-oss: a message to `functions.NAME` in the channel `commentary`."""

deepseek = headed(
    r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    r"([^\s<>{}`]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?"
)
"""DeepSeek V3, R1 and V3.1: the name, and JSON in a fence or without one, between control tokens."""


def _object(text: str, ended: bool) -> tuple[dict[str, Any], str] | None:
    """Return the object at the beginning of `text`, and the rest; None without a complete object."""
    read = _value(text.lstrip(), ended)
    return read if read is not None and isinstance(read[0], dict) else None


def _value(text: str, ended: bool) -> tuple[Any, str] | None:
    """Return the value at the beginning of `text`, and the rest; None without a complete value. Once a reply has ended,
    a value in Python's form counts, too."""
    try:
        found, end = read_json(text)
    except (ValueError, RecursionError):
        try:
            found, end = read_loose(text) if ended else (None, 0)
        except (ValueError, RecursionError):
            return None
    return (found, text[end:]) if end else None


def _call(found: Mapping[str, Any]) -> ToolCall | None:
    """Return the call that a JSON object describes. Arguments may be a text: an object in JSON, else the only
    argument."""
    function = found.get("function")
    found = function if isinstance(function, dict) else found
    name = found.get("name", function if isinstance(function, str) else None)
    arguments = found.get("arguments", found.get("parameters")) or {}
    if isinstance(arguments, str):
        read = _object(arguments, ended=True)
        arguments = {"arguments": arguments} if read is None or read[1].strip() else read[0]
    return made(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _depth(value: object) -> int:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


_HEAD = re.compile(r"\s*<\|tool_call>\s*call:\s*([^{}\n]+?)\s*(?=\{)")

_END = re.compile(rf"\s*(?:{CALL_END})?")


def gemma(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Read calls of Gemma 4, whose keys, and at times whose texts, have no quotation marks."""

    def read(text: str) -> tuple[ToolCall | None, str] | None:
        if (head := _HEAD.match(text)) is None:
            return None
        try:
            values, end = LooseReader(text, bare=True, ended=ended).value(head.end(), Schema.of(tools.get(head[1])))
        except (ValueError, RecursionError):
            return None
        return made(head[1], values), _END.sub("", text[end:], count=1)

    return _repeated(text, read)

"""The calls in a text, with other markup in each family: in JSON, or with values between tags, without escapes, so that
a value may hold the same tags.

Between tags a beam search goes over readings: a tag may end something, or be a part of a value. The reading with the
fewest faults counts: tags without their other half, calls without an end, names that the function lacks. Of readings
with as many faults the one whose values hold the fewest tags counts.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from edgellm.engine import ToolCall
from edgellm.llm.tools.values import (
    ANYTHING,
    Schema,
    Tool,
    literal,
    read_json,
    read_loose,
    typed,
    valid_text,
    write_json,
)

Parsed: TypeAlias = tuple[list[ToolCall], str]
"""The calls at the beginning of a text, and the rest, which may begin with an incomplete call."""
Parse: TypeAlias = Callable[[str, Mapping[str, Tool], bool], Parsed]
"""A reader of the calls in a text, with the tools by name. The flag tells that the text has ended, which closes open
brackets."""

_MAX_DEPTH = 100  # nested objects and lists in arguments: clients' readers take no more


def made(name: str, arguments: Mapping[str, Any]) -> ToolCall | None:
    """Return a call with arguments in valid JSON; None where these are nested too deep."""
    if _is_deeper(arguments, _MAX_DEPTH):
        return None
    return ToolCall(valid_text(name), write_json(arguments), f"call_{secrets.token_hex(12)}")


def _is_deeper(value: object, most: int) -> bool:
    """Return whether values are nested in more than `most` levels."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return most < 1 or any(_is_deeper(one, most - 1) for one in inside)


CLOSED = re.compile(
    r"(?:\s*(?:</tool_call>|<tool_call\|>|<\|call\|>|<\|end\|>|```|<｜tool▁call▁end｜>|<｜tool▁calls▁end｜>|[;\]]))*\s*"
)
"""The markup behind a call, of any family."""

_Read: TypeAlias = Callable[[str, Schema, bool], tuple[Any, int]]
"""A reader of the value at the beginning of a text, and its end, by the schema of a function's parameters. The flag
tells that the text has ended."""


def _in_json(text: str, _schema: Schema, ended: bool) -> tuple[Any, int]:
    """Read JSON; once a reply has ended, a value in Python's form counts, too."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        if not ended:
            raise
        return read_loose(text)


def behind(head: str, read: _Read = _in_json, *, offered: bool = False) -> Parse:
    """Return the reader of calls that follow `head`, a pattern: if it has the group `name`, an object with the
    arguments; else an object that describes a call, or a list of these. `offered`: only calls of given tools count."""
    pattern = re.compile(rf"{CLOSED.pattern}(?:{head})\s*(?=[{{\[])", re.DOTALL)

    def parse(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
        calls: list[ToolCall] = []
        while (found := pattern.match(text)) is not None:
            name = (found.groupdict().get("name") or "").strip()
            try:
                value, end = read(text[found.end() :], Schema.of(tools.get(name)), ended)
            except (ValueError, RecursionError):
                break
            several = value if isinstance(value, list) and not name else [value]
            described = [one for one in several if isinstance(one, dict)]
            made_of = [made(name, one) if name else _call(one) for one in described]
            new = [call for call in made_of if call is not None and (call.name in tools or not offered)]
            if not new:
                break
            calls += new
            text = CLOSED.sub("", text[found.end() + end :], count=1)
        return calls, text

    return parse


def _call(found: Mapping[str, Any]) -> ToolCall | None:
    """Return the call that a JSON object describes. Arguments may be a text: an object in JSON, else the only
    argument."""
    function = found.get("function")
    found = function if isinstance(function, dict) else found
    name = found.get("name", function if isinstance(function, str) else None)
    arguments = found.get("arguments", found.get("parameters")) or {}
    if isinstance(arguments, str):
        value = literal(arguments.strip())
        arguments = value if isinstance(value, dict) else {"arguments": arguments}
    return made(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


tagged = behind(r".*?<tool_call>")
"""Hermes and Qwen: `<tool_call>` around a JSON object."""

bare = behind(r"(?:<\|python_tag\|>)?", offered=True)
"""Llama 3: JSON objects alone, separated by semicolons, perhaps after `<|python_tag|>`."""

mistral = behind(r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\[\]{]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\s*\{))?")
"""Mistral: `[TOOL_CALLS]` before a list of objects, since 2025 before each name and arguments."""

harmony = behind(r"(?:<\|start\|>\s*assistant)?[^{]*?\bto=(?:functions\.)?(?P<name>[^\s<>{}]+)[^{]*?<\|message\|>")
"""gpt-oss: a message to `functions.NAME` in the channel `commentary`."""

deepseek = behind(
    r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    r"(?P<name>[^\s<>{}`]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?"
)
"""DeepSeek V3, R1 and V3.1: the name, and JSON in a fence or without one, between control tokens."""

gemma = behind(
    r"<\|tool_call>\s*call:\s*(?P<name>[^{}\n]+?)(?=\s*\{)",
    lambda text, schema, ended: read_loose(text, schema, bare=True, ended=ended),
)
"""Gemma 4, whose keys, and at times whose texts, have no quotation marks."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a reading's faults."""

    unpaired: int = 1  # a tag in a value, without its other half
    no_end: int = 1  # a value without its closing tag
    no_close: int = 2  # a call without its closing tag
    unknown: int = 2  # a parameter that the function lacks, or has already
    stray: int = 3  # a tag, or a text, where none can be
    not_on_its_line: int = 3  # a value without its closing tag, and the next parameter in the middle of a line


_FAULT = _Weights()

_XML = re.compile(
    r"(?P<open>(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>)|(?P<key><parameter=(?P<parameter>[^<>\n]+)>)"
    r"|(?P<end></parameter>)|(?P<close></function>(?:\s*</tool_call>)?|</tool_call>)"
)
_PAIRS = re.compile(
    r"(?P<open><tool_call>\s*(?P<name>[^\s<>][^<>\n]*))|(?P<key><arg_key>(?P<parameter>.*?)</arg_key>\s*<arg_value>)"
    r"|(?P<end></arg_value>)|(?P<close></tool_call>)"
)


def _read(tags: re.Pattern[str], text: str, tools: Mapping[str, Tool], ended: bool, *, broken: bool) -> Parsed:
    """Return the calls of a text. `broken`: a line break before a value, and one behind it, belong to its tags."""
    schemas = {name: Schema.of(tool) for name, tool in tools.items()}
    readings = [_Reading()]
    for tag in tags.finditer(text):
        best: dict[object, _Reading] = {}
        for one in (one for reading in readings for one in _followed(reading, tag, text, schemas)):
            if one.rank < best.setdefault(one.state, one).rank:
                best[one.state] = one
        # The limit keeps the time linear in the number of tags.
        readings = sorted(best.values(), key=lambda one: (one.name is not None, one.rank))[:24]
    found = min((one for reading in readings for one in _finished(reading, text, schemas, ended)),
                key=lambda one: one.rank, default=_Reading())  # fmt: skip
    calls = []
    for name, written in found.calls:
        schema = schemas.get(name, ANYTHING)
        values = {key: typed(value.removeprefix("\n").removesuffix("\n") if broken else value, schema.property(key))
                  for key, value in written}  # fmt: skip
        calls.append(made(name, values))
    read = [call for call in calls if call is not None]
    return (read, found.text) if read else ([], text)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A reading of a text up to a tag. It is in the call of `name`, and in the value of `key`, which holds `depth`
    tags without their other half; `at` is where the value begins, or where the last tag ends."""

    faults: int = 0
    held: int = 0  # tags in values
    calls: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    text: str = ""  # beside the calls
    at: int = 0
    name: str | None = None
    values: tuple[tuple[str, str], ...] = ()
    key: str | None = None
    depth: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return self.faults, self.held

    @property
    def state(self) -> tuple[object, ...]:
        """Return what later faults depend on."""
        return self.name, self.key, self.depth, frozenset(key for key, _ in self.values)

    def after(self, faults: int, **changes: Any) -> _Reading:
        """Return the reading with further faults, and other fields."""
        return replace(self, faults=self.faults + faults, **changes)

    def value(self, end: int, text: str, *, tag: bool) -> _Reading:
        """Return the reading with the value ended at `end`, by its `tag` or without one."""
        value = text[self.at : end] if tag else text[self.at : end].rstrip("\n")
        missing = 0 if tag else _FAULT.no_end if value.strip() else _FAULT.stray
        values = (*self.values, (self.key or "", value))
        return self.after(self.depth * _FAULT.unpaired + missing, values=values, key=None, depth=0, at=end)

    def call(self, *, tag: bool) -> _Reading:
        """Return the reading with the call ended, by its `tag` or without one."""
        calls = (*self.calls, (self.name or "", self.values))
        return self.after(0 if tag else _FAULT.no_close, calls=calls, name=None, values=())


def _followed(reading: _Reading, tag: re.Match[str], text: str, schemas: Mapping[str, Schema]) -> Iterator[_Reading]:
    """Yield what a reading may be after the next tag."""
    kind, between = tag.lastgroup, text[reading.at : tag.start()]
    if reading.name is None:
        reading = replace(reading, text=reading.text + between, at=tag.end())
        yield reading.after(_FAULT.stray, text=reading.text + tag[0])
        if kind == "open":
            yield replace(reading, name=tag["name"].strip())
        return
    if reading.key is not None:
        begins = kind in ("open", "key")
        depth = reading.depth + (1 if begins else -1)
        yield reading.after(_FAULT.unpaired if depth < 0 else 0, held=reading.held + 1, depth=max(0, depth))
        split = kind == "key" and not re.search(r"\n[ \t]*$", between)
        ended = reading.value(tag.start(), text, tag=kind == "end")
        reading = ended.after(_FAULT.not_on_its_line if split else 0, at=tag.end())
        if kind == "end":
            yield reading
            return
    else:
        reading = reading.after(_FAULT.stray if between.strip() else 0, at=tag.end())
        yield reading.after(_FAULT.stray)
    if kind == "close":
        yield reading.call(tag=True)
    elif kind == "open":
        yield replace(reading.call(tag=False), name=tag["name"].strip())
    elif kind == "key":
        key = tag["parameter"].strip()
        known = schemas.get(reading.name or "", ANYTHING).names()
        new = (not known or key in known) and all(key != one for one, _ in reading.values)
        yield reading.after(0 if new else _FAULT.unknown, key=key)


def _finished(reading: _Reading, text: str, schemas: Mapping[str, Schema], ended: bool) -> Iterator[_Reading]:
    """Yield what a reading is at the end of the text; nothing where a call is not complete."""
    if reading.name is None:
        yield replace(reading, text=reading.text + text[reading.at :])
    elif ended:
        schema = schemas.get(reading.name, ANYTHING)
        between = text[reading.at :].strip() if reading.key is None else ""
        reading = reading if reading.key is None else reading.value(len(text), text, tag=False)
        keys = {key for key, _ in reading.values}
        if not between and (keys or not schema.names()) and schema.required() <= keys:
            yield reading.call(tag=False)


xml: Parse = partial(_read, _XML, broken=True)
"""Qwen3-Coder and Qwen3.5: `<function=NAME>` around `<parameter=NAME>` and its value on lines of its own."""

pairs: Parse = partial(_read, _PAIRS, broken=False)
"""GLM: the name, then `<arg_key>` and `<arg_value>` in turn."""

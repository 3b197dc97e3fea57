"""Calls whose values stand between tags without escapes, so that a value may hold the same tags.

A beam search over readings: a tag may end something, or be a part of a value. The reading with the fewest faults
counts: tags without their other half, calls without an end, names that the function lacks. Of readings with as many
faults the one whose values hold the fewest tags counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from edgellm.llm.tools.json_calls import Parsed, made
from edgellm.llm.tools.values import ANYTHING, Schema, Tool, typed


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


def xml(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Qwen3-Coder and Qwen3.5: `<function=NAME>` around `<parameter=NAME>` and its value on lines of its own."""
    return _read(_XML, text, tools, ended, broken=True)


def pairs(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """GLM: the name, then `<arg_key>` and `<arg_value>` in turn."""
    return _read(_PAIRS, text, tools, ended, broken=False)


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

    def value(self, end: int, text: str, *, tag: bool) -> _Reading:
        """Return the reading with the value ended at `end`, by its `tag` or without one."""
        value = text[self.at : end] if tag else text[self.at : end].rstrip("\n")
        missing = 0 if tag else _FAULT.no_end if value.strip() else _FAULT.stray
        faults = self.faults + self.depth * _FAULT.unpaired + missing
        return replace(self, faults=faults, values=(*self.values, (self.key or "", value)), key=None, depth=0, at=end)

    def call(self, *, tag: bool) -> _Reading:
        """Return the reading with the call ended, by its `tag` or without one."""
        faults = self.faults + (0 if tag else _FAULT.no_close)
        return replace(self, faults=faults, calls=(*self.calls, (self.name or "", self.values)), name=None, values=())


def _followed(reading: _Reading, tag: re.Match[str], text: str, schemas: Mapping[str, Schema]) -> Iterator[_Reading]:
    """Yield what a reading may be after the next tag."""
    kind, between = tag.lastgroup, text[reading.at : tag.start()]
    if reading.name is None:
        reading = replace(reading, text=reading.text + between, at=tag.end())
        yield replace(reading, faults=reading.faults + _FAULT.stray, text=reading.text + tag[0])
        if kind == "open":
            yield replace(reading, name=tag["name"].strip())
        return
    if reading.key is not None:
        begins = kind in ("open", "key")
        depth = reading.depth + (1 if begins else -1)
        yield replace(
            reading,
            held=reading.held + 1,
            depth=max(0, depth),
            faults=reading.faults + (_FAULT.unpaired if depth < 0 else 0),
        )
        split = kind == "key" and not re.search(r"\n[ \t]*$", between)
        reading = reading.value(tag.start(), text, tag=kind == "end")
        reading = replace(reading, at=tag.end(), faults=reading.faults + (_FAULT.not_on_its_line if split else 0))
        if kind == "end":
            yield reading
            return
    else:
        stray = reading.faults + (_FAULT.stray if between.strip() else 0)
        reading = replace(reading, at=tag.end(), faults=stray)
        yield replace(reading, faults=stray + _FAULT.stray)
    if kind == "close":
        yield reading.call(tag=True)
    elif kind == "open":
        yield replace(reading.call(tag=False), name=tag["name"].strip())
    elif kind == "key":
        key = tag["parameter"].strip()
        known = schemas.get(reading.name or "", ANYTHING).names()
        new = (not known or key in known) and all(key != one for one, _ in reading.values)
        yield replace(reading, key=key, faults=reading.faults + (0 if new else _FAULT.unknown))


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

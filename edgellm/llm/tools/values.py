"""The values of a call, by the JSON schema of its function's parameters, in JSON or as models write them otherwise: in
Python's form, in Gemma's, and without quotation marks. They are written as JSON that every reader takes: only numbers
that JSON knows, and only texts that UTF-8 can hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias
from urllib.parse import unquote

Tool: TypeAlias = Mapping[str, Any]
"""A function as OpenAI's API describes it: `{"type": "function", "function": {"name", "description", ...}}`."""

_MOST_PARTS = 200  # most schemas for one value: references may multiply, or follow each other, without end
_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array",
}  # fmt: skip


class Schema:
    """A part of a JSON schema. An invalid schema allows everything: a call is read whatever its tool says."""

    def __init__(self, given: object, root: object) -> None:
        """Look up references in `root`, the whole schema."""
        self._given, self._root = given, root

    @classmethod
    def of(cls, tool: Tool | None) -> Schema:
        """Return the schema of a function's parameters; for an unknown function everything is allowed."""
        parameters = _mapping(_mapping(tool).get("function")).get("parameters")
        return cls(parameters, parameters)

    def names(self) -> frozenset[str]:
        """Return the names of the properties that are described."""
        return frozenset(name for part in self._parts() for name in _mapping(part.get("properties")))

    def required(self) -> frozenset[str]:
        """Return the names of the properties that every alternative requires."""
        parts = self._parts(("allOf",))
        return frozenset(name for part in parts for name in _listed(part.get("required")) if isinstance(name, str))

    def property(self, name: str) -> Schema:
        """Return the schema of a property."""
        described = [part["properties"] for part in self._parts() if name in _mapping(part.get("properties"))]
        return self._any_of([part[name] for part in described] or self._values("additionalProperties"))

    def items(self) -> Schema:
        """Return the schema of an array's items."""
        return self._any_of(self._values("items"))

    def allows(self, value: object, *, exact: bool = True) -> bool:
        """Return whether a value has the schema's type, and is one of its values; not `exact`: has the type of one of
        its values."""
        known: dict[int, bool] = {}

        def allowed(given: object) -> bool:
            if not isinstance(given, Mapping) or len(known) > _MOST_PARTS:
                return given is not False
            if id(given) not in known:
                known[id(given)] = True  # A circular reference adds nothing.
                known[id(given)] = checked(given)
            return known[id(given)]

        def checked(given: Mapping[str, Any]) -> bool:
            if value is None and given.get("nullable") is True:
                return True
            kinds, own = given.get("type", []), _KINDS[type(value)]
            kinds = [str(kind).lower() for kind in ([kinds] if isinstance(kinds, str) else _listed(kinds))]
            if kinds and own not in kinds and not (own == "integer" and "number" in kinds):
                return False
            values = [given["const"]] if "const" in given else _listed(given.get("enum"))
            if values and not any(type(one) is type(value) and (one == value or not exact) for one in values):
                return False
            either = [some for key in ("anyOf", "oneOf") if (some := _listed(given.get(key)))]
            return (
                ("$ref" not in given or allowed(self._target(given["$ref"])))
                and all(map(allowed, _listed(given.get("allOf"))))
                and all(any(map(allowed, some)) for some in either)
            )

        return allowed(self._given)

    def _any_of(self, found: list[object]) -> Schema:
        return Schema(found[0] if len(found) == 1 else {"anyOf": found}, self._root)

    def _values(self, key: str) -> list[object]:
        return [part[key] for part in self._parts() if key in part]

    def _parts(self, combined: Sequence[str] = ("allOf", "anyOf", "oneOf")) -> Iterator[Mapping[str, Any]]:
        """Yield the schema, and the schemas that it refers to or combines."""
        waiting = [self._given]
        for number in range(_MOST_PARTS):
            if number == len(waiting):
                return
            part = _mapping(waiting[number])
            yield part
            waiting += [self._target(part["$ref"])] if "$ref" in part else []
            waiting += [one for key in combined for one in _listed(part.get(key))[:_MOST_PARTS]]

    def _target(self, reference: object) -> object:
        """Return the target of a reference; None outside the whole schema."""
        found = self._root
        for part in unquote(str(reference)).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = dict(enumerate(found)).get(int(key)) if isinstance(found, list) and key.isdecimal() else (
                _mapping(found).get(key))  # fmt: skip
        return found


ANYTHING = Schema(None, None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


CALL_END = r"<tool_call\|>"
"""Gemma's mark behind a call, which closes open objects and lists."""
_QUOTE = r'<\|"\|>'  # Gemma's quotation mark, without escapes
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None, "none": None}
_QUOTED = re.compile(rf"{_QUOTE}|[\"']")
_KEY = r"[^\s:={}\[\],][^:={}\[\],]*?"  # key without quotation marks
_BEHIND = rf"(?=\s*(?:[,}}\]]|{CALL_END}|$))"  # text after the last bracket of an object
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "/": "/", '"': '"', "'": "'"}


def typed(text: str, schema: Schema) -> object:
    """Return the value of `text`, which lacks quotation marks, by its schema: a text only if the schema allows no other
    reading."""
    bare = text.strip()
    value = literal(bare)
    values = [] if isinstance(value, str) else [value]
    if isinstance(value, float) and value.is_integer():
        values.append(int(value))
    values += [text, bare, value]
    allowed = (one for exact in (True, False) for one in values if schema.allows(one, exact=exact))
    return next(allowed, values[0])


def literal(text: str) -> object:
    """Return the value of `text` in JSON or in Python, else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (read_json, read_loose) if text[:1] in ("{", "[") else (read_json,):
        try:
            value, end = read(text)
            if end == len(text):
                return value
        except (ValueError, RecursionError):
            """Not in that form."""
    return text


def read_loose(
    text: str, schema: Schema = ANYTHING, *, bare: bool = False, ended: bool = False
) -> tuple[Any, int]:  # fmt: skip
    """Return the value at the beginning of `text` in JSON's form or Python's, and its end. `bare`: keys and texts may
    lack quotation marks, and end before known signs. `ended`: `text` is complete, so that its end closes open brackets.
    Raise ValueError without a complete value."""
    return _LooseReader(text, bare, ended).value(0, schema)


class _LooseReader:
    """A reader of objects and lists with any of three quotation marks, and with `:` or `=` behind keys."""

    def __init__(self, text: str, bare: bool, ended: bool) -> None:
        self._text, self._bare = text, bare
        self._over = CALL_END + ("|$" if ended else "") if bare else "(?!)"  # end of all brackets

    def value(self, at: int, schema: Schema, inside: Schema | None = None) -> tuple[Any, int]:
        """Return the value at `at`, and its end. `inside`: the schema of the surrounding object; None in a list. Raise
        ValueError without a complete value."""
        at = self._past(r"\s*", at)
        first = self._text[at : at + 1]
        empty: object = {"{": {}, "[": []}.get(first, "")
        if empty != "" and (not self._bare or schema.allows(empty, exact=False) or not schema.allows("")):
            return self._object(at + 1, schema) if first == "{" else self._list(at + 1, schema.items())
        if _QUOTED.match(self._text, at):
            try:
                return self._quoted(at, self._after(inside))
            except ValueError:  # The mark belongs to a bare text.
                if not self._bare:
                    raise
        if not self._bare:
            end = self._past(r"[^\s,\]}<]*", at)
            value = literal(self._text[at:end])
            if isinstance(value, str):
                raise ValueError(self._text[at:])
            return value, end
        end = self._bare_end(at, inside, _KEY)
        value = typed(self._text[at:end].strip(), schema)
        if isinstance(value, str) and inside is not None and (known := _known(inside)):
            end = self._bare_end(at, inside, known)
            value = typed(self._text[at:end].strip(), schema)
        return value, end

    def _object(self, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while (end := self._end(at, "}")) is None:
            key, at = self._key(self._past(r"\s*", at), _known(schema))
            found[key], at = self.value(at, schema.property(key), schema)
            at = self._past(r"\s*,?", at)
        return found, end

    def _list(self, at: int, schema: Schema) -> tuple[list[Any], int]:
        found: list[Any] = []
        while (end := self._end(at, "]")) is None:
            value, at = self.value(at, schema)
            found.append(value)
            at = self._past(r"\s*,?", at)
        return found, end

    def _end(self, at: int, bracket: str) -> int | None:
        """Return the end of an object or a list that ends at `at`, else None."""
        at = self._past(r"\s*", at)
        if self._text.startswith(bracket, at):
            return at + 1
        return at if re.compile(self._over).match(self._text, at) else None

    def _past(self, pattern: str | re.Pattern[str], at: int) -> int:
        """Return the end of the match of `pattern` at `at`; `at` without a match."""
        found = re.compile(pattern).match(self._text, at)
        return found.end() if found else at

    def _key(self, at: int, known: str) -> tuple[str, int]:
        """Return the key at `at`, and where its value begins."""
        if _QUOTED.match(self._text, at):
            key, end = self._quoted(at, re.compile(r"\s*[:=]"))
        else:
            found = re.compile(rf"(?:{known or '(?!)'}|{_KEY})(?=\s*[:=])").match(self._text, at)
            if not (self._bare and found):
                raise ValueError(self._text[at:])
            key, end = found[0], found.end()
        if (value := self._past(r"\s*[:=]", end)) == end:
            raise ValueError(self._text[at:])
        return key, value

    def _quoted(self, at: int, after: re.Pattern[str]) -> tuple[str, int]:
        """Return the text in quotation marks at `at`, and its end: the first mark that `after` follows. Raise
        ValueError without such a mark."""
        end = begin = self._past(_QUOTED, at)
        mark = self._text[at:begin]
        plain = len(mark) > 1
        part = re.compile(rf".*?{_QUOTE}" if plain else rf"(?:[^\\{mark}]|\\.)*{mark}", re.DOTALL)
        while found := part.match(self._text, end):
            end = found.end()
            if after.match(self._text, end):
                text = self._text[begin : end - len(mark)]
                return (text if plain else _unescaped(text)), end
        raise ValueError(self._text[at:])

    def _after(self, inside: Schema | None) -> re.Pattern[str]:
        """Return the pattern behind a text in quotation marks."""
        if inside is None or not self._bare:
            return re.compile(rf"\s*(?:[,\]}}]|{CALL_END}|$)")
        key = rf"(?:{_known(inside) or '(?!)'})\s*[:=]"
        comma = rf",\s*(?:{key}|{_KEY}\s*[:=]|{_QUOTED.pattern}|\}})"
        return re.compile(rf"\s*(?:$|\}}{_BEHIND}|{CALL_END}|{key}|{comma})")

    def _bare_end(self, at: int, inside: Schema | None, key: str) -> int:
        """Return the end of a text without quotation marks, in an object before `key`: the first place with balanced
        brackets, if any."""
        if inside is None:
            ends = rf"[,\]]|{self._over}"
        else:
            quoted = rf"{_QUOTE}(?:(?!{_QUOTE}).)*{_QUOTE}|\"[^\"]*\""
            ends = rf",\s*(?:{key}|{quoted})\s*[:=]|,?\s*\}}{_BEHIND}|{self._over}"
        places = [found.start() for found in re.compile(ends, re.DOTALL).finditer(self._text, at)]
        if not places or (places[0] == at and self._text[at : at + 1] not in (",", "}")):
            raise ValueError(self._text[at:])
        curly = square = 0
        for start, end in pairwise((at, *places)):
            curly += self._text.count("{", start, end) - self._text.count("}", start, end)
            square += self._text.count("[", start, end) - self._text.count("]", start, end)
            if curly == square == 0:
                return end
        return places[0]


def _known(schema: Schema) -> str:
    """Return the pattern of the names of an object's properties, longer ones first; empty where none are known."""
    return "|".join(map(re.escape, sorted(schema.names(), key=len, reverse=True)))


def _unescaped(text: str) -> str:
    """Return a text with the escapes of JSON and Python replaced; other backslashes stay."""

    def meant(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code is None:
            return _ESCAPED.get(found[4], found[0])
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\ufffd"

    return _ESCAPE.sub(meant, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_HALF_PAIR = re.compile("[\ud800-\udfff]")  # json joins whole surrogate pairs; what is left has no other half


def _number(text: str) -> float | str:
    """Return a number, or its text where it is too large for a finite float."""
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
        return value if math.isfinite(value) else text
    except (ValueError, OverflowError):
        return text


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=str, strict=False)


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the value at `at`, and its end. NaN and numbers beyond finite floats are read as texts, and texts may
    contain bare line breaks. Raise ValueError for a missing or incomplete value, and RecursionError for too deep
    nesting."""
    return _DECODER.raw_decode(text, at)


def write_json(value: object) -> str:
    """Return a value as JSON, with U+FFFD for each half of a surrogate pair. Raise ValueError for NaN and infinity."""
    return valid_text(json.dumps(value, ensure_ascii=False, allow_nan=False))


def valid_text(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair."""
    return _HALF_PAIR.sub("\ufffd", text)

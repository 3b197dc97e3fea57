"""JSON schemas as grammars in llama.cpp's notation (GBNF).

Schemas come from strangers, so size, depth and the number of rules are limited, nothing is fetched, and a keyword that
a grammar would not keep is refused instead of ignored: a reply that follows the grammar is valid. llama.cpp keeps one
stack for each way to read the text so far. Alternatives that begin alike multiply these ways, without end where they
are within themselves; the latter are refused, and the others limited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from edgellm.errors import InvalidOption

Schema: TypeAlias = Mapping[str, Any]

MAX_SCHEMA = 2**15  # characters of a schema as JSON
_MAX_DEPTH, _MAX_RULES, _MAX_GRAMMAR, _MAX_WAYS = 32, 2000, 2**18, 256
_MAX_REPEATED = 1000  # of a string's characters or an array's items
_MAX_ALL_REPEATED = 10_000  # in all: llama.cpp makes a rule for each
_MAX_INTEGERS = 1000  # between a minimum and a maximum, as they are listed

_BASE = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" ["\\bfnrt/]',
    "string": r'"\"" char* "\""',
    "integer": r'"-"? natural',
    "natural": r'"0" | [1-9] [0-9]{0,14}',
    "number": r'integer ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,2})?',
    "boolean": r'"true" | "false"',
    "null": r'"null"',
    "value": "object | array | string | number | boolean | null",
    "object": r'"{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}"',
    "array": r'"[" ws (value ("," ws value)* ws)? "]"',
}
_KINDS = ("string", "integer", "number", "boolean", "null", "object", "array")
_NOTES = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
     "readOnly", "writeOnly", "format")
)  # fmt: skip
"""Keywords that say nothing about what is valid."""
_KNOWN = {
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
"""Keywords of each type that the grammar keeps."""


def to_gbnf(schema: str) -> str:
    """Return the grammar, with the rule `root`, for values that are valid by `schema`, a JSON schema as text.

    Objects have their properties in the schema's order, and no others unless `properties` is left out.

    Raises:
        InvalidOption: it is no JSON schema, uses a keyword that is not kept, or is too large or ambiguous.
    """
    if len(schema) > MAX_SCHEMA:
        raise _refused(f"it has {len(schema)} characters; at most {MAX_SCHEMA} are allowed", "Shorten it.")
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON ({str(error)[:100]})", "Send a JSON object.") from None
    return _Writer(read).grammar()


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: dict[str, str] = {}
        self._ways: dict[str, int] = {}  # of reading the same text, by rule
        self._by_ref: dict[str, str] = {}
        self._open: list[str] = []  # references whose rules are being written
        self._recursive: set[str] = set()
        self._repeated = 0
        self._alike: list[tuple[str, ...]] = []  # references around alternatives that begin alike

    def grammar(self) -> str:
        self._rules["root"] = self._of(self._root, 0)
        if any(self._recursive.intersection(around) for around in self._alike):
            raise _refused(
                "alternatives that begin alike contain themselves",
                "Tell them apart by their types, or drop the recursion.",
            )
        text = "\n".join(f"{name} ::= {rule}" for name, rule in {**_BASE, **self._rules}.items())
        if len(text) > _MAX_GRAMMAR:
            raise _refused("its grammar is too long", "Shorten it.")
        return text

    def _add(self, rule: str, ways: int) -> str:
        name = f"r{len(self._rules)}"
        if len(self._rules) >= _MAX_RULES:
            raise _refused(f"it needs more than {_MAX_RULES} rules", "Simplify it.")
        if ways > _MAX_WAYS:
            raise _refused(
                f"a text can be read in more than {_MAX_WAYS} ways", "Use fewer alternatives that begin alike."
            )
        self._rules[name], self._ways[name] = rule, ways
        return name

    def _of(self, schema: Any, depth: int) -> str:
        """Return the name of the rule for a schema."""
        if depth > _MAX_DEPTH:
            raise _refused(f"it is more than {_MAX_DEPTH} levels deep", "Simplify it.")
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise _refused(f"{json.dumps(schema)[:60]} stands where a schema should", "Give an object.")
        given = {key: value for key, value in schema.items() if key not in _NOTES}
        if "$ref" in given:
            self._only(given, {"$ref"})
            return self._reference(given["$ref"], depth)
        if "const" in given:
            return self._add(_literal(given["const"]), 1)
        if "enum" in given:
            return self._enum(given["enum"])
        if key := next((key for key in ("anyOf", "oneOf", "allOf") if key in given), None):
            self._only(given, {key, "type"})
            parts = given[key]
            if not isinstance(parts, list) or not parts or (key == "allOf" and len(parts) != 1):
                raise _refused(f"{key} needs a list of schemas, and allOf one alone", "Merge the schemas.")
            return self._any([self._of(part, depth + 1) for part in parts], parts)
        return self._typed(given, depth)

    def _typed(self, given: Schema, depth: int) -> str:
        """Return the name of the rule for a schema without references and alternatives."""
        kinds = given.get("type", _implied(given))
        if isinstance(kinds, list) and kinds:
            parts = [{**{key: value for key, value in given.items() if key in _KNOWN.get(kind, ())}, "type": kind}
                     for kind in kinds]  # fmt: skip
            return self._any([self._of(part, depth + 1) for part in parts], parts)
        if kinds is None:
            self._only(given, set())
            return "value"
        if kinds not in _KINDS:
            raise _refused(f"{json.dumps(kinds)[:60]} is no type", f"Use one of {', '.join(_KINDS)}.")
        self._only(given, {"type", *_KNOWN.get(kinds, ())})
        match kinds:
            case "object" | "array":
                return (self._object if kinds == "object" else self._array)(given, depth)
            case "string" | "integer":
                return (self._string if kinds == "string" else self._integer)(given)
        return str(kinds)

    def _only(self, given: Schema, known: set[str]) -> None:
        if unknown := sorted(set(given) - known):
            raise _refused(
                f"the keyword {unknown[0]!r} is not supported there", "Leave it out, or describe it in words."
            )

    def _reference(self, ref: Any, depth: int) -> str:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _refused(f"$ref is {json.dumps(ref)[:60]}", "Only references within the schema (#/$defs/NAME) work.")
        if ref in self._by_ref:
            self._recursive.update(self._open[self._open.index(ref) :] if ref in self._open else ())
            return self._by_ref[ref]
        target: Any = self._root
        for part in ref.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                raise _refused(f"$ref {ref!r} leads nowhere", "Check the name.")
            target = target[key]
        name = self._by_ref[ref] = self._add('""', 1)
        self._open.append(ref)
        found = self._of(target, depth + 1)
        self._open.pop()
        if found == name:
            raise _refused(f"$ref {ref!r} refers to itself", "Describe a value there.")
        self._rules[name], self._ways[name] = found, self._ways.get(found, 1)
        return name

    def _any(self, names: Sequence[str], parts: Sequence[Any]) -> str:
        groups: dict[str, int] = {}
        for name, part in zip(names, parts, strict=True):
            for first in self._firsts(part, 0):
                groups[first] = groups.get(first, 0) + self._ways.get(name, 1)
        alike = [first for first, ways in groups.items() if ways > 1 and first in ("{", "[")]
        if alike:
            self._alike.append(tuple(self._open))
        return self._add(" | ".join(names), max(groups.values(), default=1))

    def _firsts(self, schema: Any, depth: int) -> Iterator[str]:
        """Yield the characters that values of a schema may begin with; "0" stands for numbers."""
        kinds = {"string": '"', "integer": "0", "number": "0", "boolean": "t", "null": "n", "object": "{", "array": "["}
        given = schema if isinstance(schema, dict) and depth <= _MAX_DEPTH else {}
        if "const" in given or "enum" in given:
            listed = [given["const"]] if "const" in given else given["enum"]
            yield from sorted({json.dumps(value)[:1] for value in listed})
        elif isinstance(named := given.get("type", _implied(given)), str):
            yield kinds.get(named, "{")
        elif isinstance(named, list):
            yield from (kinds.get(str(kind), "{") for kind in named)
        elif parts := [part for key in ("anyOf", "oneOf", "allOf") for part in given.get(key, ())]:
            yield from sorted({first for part in parts for first in self._firsts(part, depth + 1)})
        else:  # anything, or a reference
            yield from kinds.values()

    def _enum(self, values: Any) -> str:
        if not isinstance(values, list) or not values:
            raise _refused("enum needs a list of values", "Give at least one.")
        return self._add(" | ".join(dict.fromkeys(map(_literal, values))), 1)

    def _object(self, given: Schema, depth: int) -> str:
        properties, more = given.get("properties"), given.get("additionalProperties")
        required = given.get("required", [])
        if not isinstance(required, list) or not set(map(str, required)) <= set(properties or ()):
            raise _refused("required names a property that is not described", "Describe it in properties.")
        if properties is None:
            if more in (None, True):
                return "object"
            if more is False:
                return self._add(r'"{" ws "}"', 1)
            value = self._of(more, depth + 1)
            pair = f'string ":" ws {value}'
            return self._add(rf'"{{" ws ({pair} ("," ws {pair})* ws)? "}}"', self._ways.get(value, 1))
        if not isinstance(properties, dict):
            raise _refused("properties is no object", "Give a schema for each name.")
        members = [(name in required, f'{_literal(name)} ":" ws {self._of(value, depth + 1)}')
                   for name, value in properties.items()]  # fmt: skip
        ways = max((self._ways.get(rule.rpartition(" ")[2], 1) for _, rule in members), default=1)
        tail = head = '""'
        for must, member in reversed(members):
            head_name, tail_name = (head if head == '""' else self._add(head, 1)), tail
            if tail != '""':
                tail_name = self._add(tail, 1)
            head = f"{member} {tail_name}" if must else f"{member} {tail_name} | {head_name}"
            tail = f'ws "," ws {member} {tail_name}' if must else f'(ws "," ws {member})? {tail_name}'
        return self._add(rf'"{{" ws ({head}) ws "}}"', ways)

    def _array(self, given: Schema, depth: int) -> str:
        item = self._of(given.get("items", True), depth + 1)
        least, most = self._range(given, "minItems", "maxItems")
        ways = self._ways.get(item, 1)
        rest = f'("," ws {item}){{{max(0, least - 1)},{"" if most is None else max(0, most - 1)}}}'
        if most == 0:
            return self._add(r'"[" ws "]"', 1)
        body = f"{item} {rest} ws"
        return self._add(f'"[" ws {body} "]"' if least else f'"[" ws ({body})? "]"', ways)

    def _string(self, given: Schema) -> str:
        least, most = self._range(given, "minLength", "maxLength")
        if not least and most is None:
            return "string"
        return self._add(rf'"\"" char{{{least},{"" if most is None else most}}} "\""', 1)

    def _integer(self, given: Schema) -> str:
        least, most = given.get("minimum"), given.get("maximum")
        if least is None and most is None:
            return "integer"
        if most is None and least == 0:
            return "natural"
        if most is None and least == 1:
            return self._add("[1-9] [0-9]{0,14}", 1)
        if not isinstance(least, int) or not isinstance(most, int) or not 0 <= most - least <= _MAX_INTEGERS:
            raise _refused(
                f"an integer from {least} to {most} is not supported",
                f"Give both as whole numbers, at most {_MAX_INTEGERS} apart, or a minimum of 0 or 1 alone.",
            )
        return self._add(" | ".join(f'"{number}"' for number in range(least, most + 1)), 1)

    def _range(self, given: Schema, low: str, high: str) -> tuple[int, int | None]:
        least, most = given.get(low, 0), given.get(high)
        for name, value in ((low, least), (high, most)):
            if value is not None and (type(value) is not int or not 0 <= value <= _MAX_REPEATED):
                raise _refused(f"{name} is {json.dumps(value)[:40]}", f"Give a whole number from 0 to {_MAX_REPEATED}.")
        if most is not None and most < least:
            raise _refused(f"{low} is {least}, and {high} {most}", "Give a range.")
        self._repeated += least if most is None else most
        if self._repeated > _MAX_ALL_REPEATED:
            raise _refused(
                f"its lengths add up to more than {_MAX_ALL_REPEATED}", "Lower or drop maxLength and maxItems."
            )
        return least, most


def _implied(given: Schema) -> str | None:
    """Return the type that keywords imply where none is named."""
    return next((kind for kind, known in _KNOWN.items() if known & set(given)), None)


def _literal(value: object) -> str:
    """Return a JSON value as a text in GBNF."""
    written = json.dumps(value, ensure_ascii=False).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + written.encode("utf-8", "replace").decode().replace("\x7f", "\\x7F") + '"'


def _refused(why: str, what_next: str) -> InvalidOption:
    return InvalidOption(f"The JSON schema cannot be used: {why}.", what_next)

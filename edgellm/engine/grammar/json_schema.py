"""JSON schemas as grammars in llama.cpp's notation (GBNF).

Schemas come from strangers, so size, depth and the number of rules are limited, nothing is fetched, and a keyword that
a grammar would not keep is refused instead of ignored: a reply that follows the grammar is valid, but for what `unkept`
names. llama.cpp keeps one stack for each way to read the text so far. Alternatives that begin alike multiply these
ways, without end where they are within themselves; the latter are refused, and the others limited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache, reduce
from math import isfinite, isqrt
from typing import Any

from edgellm.engine.grammar.automaton import Automaton, Ranges, intersection, limited
from edgellm.engine.grammar.decimals import NumberBound, numbers
from edgellm.engine.grammar.formats import FORMATS
from edgellm.engine.grammar.keywords import (
    KEPT,
    KINDS,
    MAX_DEPTH,
    Schema,
    SchemaReader,
    alternatives,
    implied,
    is_kind,
    listed,
    refused,
    several,
    written,
)
from edgellm.engine.grammar.pattern import automaton_of

MAX_SCHEMA = 2**15  # characters of a schema as JSON
_MAX_RULES, _MAX_GRAMMAR, _MAX_WAYS = 2000, 2**19, 256
_MAX_STATES = 6000  # of all automata, each a rule
_MAX_REPEATED = 1000  # items of an array, and properties of an object
_MAX_CHARS = 100_000  # of a string
_MAX_COUNTED = 2000  # states for a pattern with a length: a longer string is not written then
_MAX_ALL_REPEATED = 10_000  # in all: llama.cpp makes a rule for each

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
_ESCAPED = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
"""What is written behind a backslash, by the character that it stands for."""


@lru_cache(maxsize=16)  # a reply needs its grammar where it is drafted, and where it is verified
def to_gbnf(schema: str) -> str:
    """Return the grammar, with the rule `root`, for values that are valid by `schema`, a JSON schema as text.

    Objects have their properties in the schema's order, and no others unless `properties` is left out; those with a
    constant, and those that a discriminator names, are always written.

    Raises:
        InvalidOption: it is no JSON schema, uses a keyword that is not kept, or is too large or ambiguous.
    """
    if len(schema) > MAX_SCHEMA:
        raise refused(f"it has {len(schema)} characters; at most {MAX_SCHEMA} are allowed", "Shorten it.")
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise refused(f"it is not JSON ({str(error)[:100]})", "Send a JSON object.") from None
    return _Writer(read).grammar()


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._reader = SchemaReader(schema)
        self._rules: dict[str, str] = {}
        self._ways: dict[str, int] = {}  # of reading the same text, by rule
        self._by_ref: dict[str, str] = {}
        self._by_text: dict[str, str] = {}  # rules of strings and numbers, by their keywords
        self._open: list[str] = []  # references whose rules are being written
        self._recursive: set[str] = set()
        self._repeated = self._states = 0
        self._alike: list[tuple[str, ...]] = []  # references around alternatives that begin alike

    def grammar(self) -> str:
        self._rules["root"] = self._of(self._root, 0)
        if any(self._recursive.intersection(around) for around in self._alike):
            raise refused(
                "alternatives that begin alike contain themselves",
                "Tell them apart by their types or by a first property with a constant, or drop the recursion.",
            )
        text = "\n".join(f"{name} ::= {rule}" for name, rule in {**_BASE, **self._rules}.items())
        if len(text) > _MAX_GRAMMAR:
            raise refused("its grammar is too long", "Shorten it.")
        return text

    def _add(self, rule: str, ways: int) -> str:
        name = f"r{len(self._rules)}"
        if len(self._rules) - self._states >= _MAX_RULES:
            raise refused(f"it needs more than {_MAX_RULES} rules", "Simplify it.")
        if ways > _MAX_WAYS:
            raise refused(
                f"a text can be read in more than {_MAX_WAYS} ways", "Use fewer alternatives that begin alike."
            )
        self._rules[name], self._ways[name] = rule, ways
        return name

    def _of(self, schema: Any, depth: int) -> str:
        """Return the name of the rule for a schema."""
        if depth > MAX_DEPTH:
            raise refused(f"it is more than {MAX_DEPTH} levels deep", "Simplify it.")
        given = self._reader.given(schema)
        if "$ref" in given:
            return self._reference(given["$ref"], depth)
        if key := next((key for key in ("anyOf", "oneOf") if key in given), None):
            return self._alternatives(given, key, depth)
        if "const" in given or "enum" in given:
            return self._enum(given)
        return self._typed(given, depth)

    def _typed(self, given: Schema, depth: int) -> str:
        """Return the name of the rule for a schema without references and alternatives."""
        kinds = given.get("type", implied(given))
        if isinstance(kinds, list) and kinds:
            self._only(given, {"type", *(key for kind in kinds for key in KEPT.get(str(kind), ()))})
            parts = [{**{key: value for key, value in given.items() if key in KEPT.get(str(kind), ())}, "type": kind}
                     for kind in kinds]  # fmt: skip
            return self._any([self._typed(part, depth + 1) for part in parts], parts)
        if kinds is None:
            self._only(given, set())
            return "value"
        if kinds not in KINDS:
            raise refused(f"{json.dumps(kinds)[:60]} is no type", f"Use one of {', '.join(KINDS)}.")
        self._only(given, {"type", *KEPT.get(kinds, ())})
        match kinds:
            case "object":
                return self._object(given, depth)
            case "array":
                return self._array(given, depth)
            case "string":
                return self._string(given)
            case "integer" | "number":
                return self._number(given, kinds)
        return str(kinds)

    def _only(self, given: Schema, known: set[str]) -> None:
        if unknown := sorted(set(given) - known):
            raise refused(
                f"the keyword {unknown[0]!r} is not supported there", "Leave it out, or describe it in words."
            )

    def _reference(self, ref: Any, depth: int) -> str:
        target = self._reader.target(ref)
        if ref in self._by_ref:
            self._recursive.update(self._open[self._open.index(ref) :] if ref in self._open else ())
            return self._by_ref[ref]
        name = self._by_ref[ref] = self._add('""', 1)
        self._open.append(ref)
        found = self._of(target, depth + 1)
        self._open.pop()
        if found == name:
            raise refused(f"$ref {ref!r} refers to itself", "Describe a value there.")
        self._rules[name], self._ways[name] = found, self._ways.get(found, 1)
        return name

    def _alternatives(self, given: Schema, key: str, depth: int) -> str:
        parts, beside = alternatives(given, key), {name: value for name, value in given.items() if name != key}
        if beside:
            parts = [{"allOf": [part, beside]} for part in parts]
        if key == "oneOf":
            for number, part in enumerate(parts):
                others = (other for place, other in enumerate(parts) if place != number)
                if not all(self._reader.excludes(part, other) for other in others):
                    raise refused(
                        f"what is valid by schema {number + 1} of a oneOf may be valid by another one of them, too",
                        "Use anyOf, or tell them apart by a property with a constant.",
                    )
        return self._any([self._of(part, depth + 1) for part in parts], parts)

    def _any(self, names: Sequence[str], parts: Sequence[Any]) -> str:
        firsts = [(set(self._reader.firsts(part)), self._ways.get(name, 1))
                  for name, part in zip(names, parts, strict=True)]  # fmt: skip
        most = 1
        for first in {first for own, _ in firsts for first in own}:
            alike = [ways for own, ways in firsts if any(one.startswith(first) or first.startswith(one) for one in own)]
            most = max(most, sum(alike))
            if sum(alike) > 1 and first[0] in "{[":
                self._alike.append(tuple(self._open))
        return self._add(" | ".join(names), most)

    def _enum(self, given: Schema) -> str:
        values = listed(given)
        kinds = given.get("type", KINDS)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        kept = [value for value in values if any(is_kind(value, kind) for kind in kinds)]
        for key in set(given) - {"const", "enum", "type"}:
            kept = [value for value in kept if self._keeps(value, key, given[key])]
        if not kept:
            raise refused("none of its listed values is valid", "Change the list, or the keywords beside it.")
        return self._add(" | ".join(dict.fromkeys(map(_literal, kept))), 1)

    def _keeps(self, value: Any, key: str, limit: Any) -> bool:
        """Return whether a listed value is valid by a keyword beside the list."""
        if key in KEPT["string"]:
            automaton, (least, most) = self._text({key: limit}), self._lengths({key: limit})
            if not isinstance(value, str):
                return True
            fits = len(value) >= least and (most is None or len(value) <= most)
            return fits and (automaton is None or automaton.accepts(value))
        if key in KEPT["number"]:
            return not (is_kind(value, "number")) or self._decimal({key: limit}, whole=False).accepts(
                f"{_exact(key, value):f}"
            )
        raise refused(f"the keyword {key!r} is not supported beside listed values", "Leave it out.")

    def _object(self, given: Schema, depth: int) -> str:
        required = given.get("required", [])
        properties = given.get("properties")
        if not isinstance(required, list) or not set(map(str, required)) <= set(properties or ()):
            raise refused("required names a property that is not described", "Describe it in properties.")
        least, most = self._range(given, "minProperties", "maxProperties")
        if properties is None:
            return self._dictionary(given, least, most, depth)
        if not isinstance(properties, dict):
            raise refused("properties is no object", "Give a schema for each name.")
        self._only(given, {"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"})
        must = self._reader.must(given)
        if least > len(must) or (most is not None and most < len(properties)):
            raise refused("it limits the number of described properties", "Leave minProperties and maxProperties out.")
        members = [(name in must, f'{_literal(name)} ":" ws {self._of(value, depth + 1)}')
                   for name, value in properties.items() if value is not False or name in must]  # fmt: skip
        ways = max((self._ways.get(rule.rpartition(" ")[2], 1) for _, rule in members), default=1)
        tail = head = '""'
        for always, member in reversed(members):
            head_name, tail_name = (head if head == '""' else self._add(head, 1)), tail
            if tail != '""':
                tail_name = self._add(tail, 1)
            head = f"{member} {tail_name}" if always else f"{member} {tail_name} | {head_name}"
            tail = f'ws "," ws {member} {tail_name}' if always else f'(ws "," ws {member})? {tail_name}'
        return self._add(rf'"{{" ws ({head}) ws "}}"', ways)

    def _dictionary(self, given: Schema, least: int, most: int | None, depth: int) -> str:
        """Return the rule for an object whose properties are not described one by one."""
        more, patterns = given.get("additionalProperties", True), given.get("patternProperties")
        if least > 1:  # a name that comes twice is one property
            raise refused(f"minProperties is {least}", "Lower it to 1, or describe the properties.")
        name = "string"
        if patterns is not None:
            if not isinstance(patterns, dict) or len(patterns) != 1:
                raise refused("patternProperties has not exactly one pattern", "Give one pattern.")
            (pattern, more), = patterns.items()  # fmt: skip
            named = {"type": "string", "pattern": pattern}
            name = self._of({"allOf": [named, given.get("propertyNames", True)]}, depth + 1)
        elif "propertyNames" in given:
            name = self._of({"allOf": [{"type": "string"}, given["propertyNames"]]}, depth + 1)
        if more is False or most == 0:
            if least:
                raise refused("it must have a property, and may have none", "Change minProperties.")
            return self._add(r'"{" ws "}"', 1)
        if name == "string" and more is True and not least and most is None:
            return "object"
        value = self._of(more, depth + 1)
        pair = f'{name} ":" ws {value}'
        rest = f'("," ws {pair})' + ("*" if most is None else f"{{0,{most - 1}}}")
        body = f"{pair} {rest} ws" if least else f"({pair} {rest} ws)?"
        return self._add(f'"{{" ws {body} "}}"', max(self._ways.get(rule, 1) for rule in (name, value)))

    def _array(self, given: Schema, depth: int) -> str:
        self._only(given, {"type", *KEPT["array"]} - {"additionalItems"})
        least, most = self._range(given, "minItems", "maxItems")
        first = given.get("prefixItems", [])
        if not isinstance(first, list):
            raise refused("prefixItems is no list of schemas", "Give a list.")
        if given.get("uniqueItems") is True and (values := self._reader.unique_values(given)) is not None:
            return self._set([_literal(value) for value in values], least, most)
        more = given.get("items", True)
        if more is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise refused(f"it must have {least} items, and may have {most}", "Change minItems, or the items.")
        if most == 0:
            return self._add(r'"[" ws "]"', 1)
        names = [self._of(item, depth + 1) for item in (first if most is None else first[:most])]
        behind = most is None or most > len(names)
        item = self._of(more, depth + 1) if behind else ""
        ways = max(self._ways.get(name, 1) for name in (*names, item))
        if not names:
            rest = f'("," ws {item}){{{max(0, least - 1)},{"" if most is None else max(0, most - 1)}}}'
            body = f"{item} {rest} ws"
            return self._add(f'"[" ws {body} "]"' if least else f'"[" ws ({body})? "]"', ways)
        tail = ""
        if behind:
            tail = f'("," ws {item}){{{max(0, least - len(names))},{"" if most is None else most - len(names)}}}'
        for number, name in reversed(list(enumerate(names))):
            own = f"{'' if number == 0 else chr(34) + ',' + chr(34) + ' ws '}{name} {tail}"
            tail = own if number < least else f"({own})?"
        return self._add(f'"[" ws {tail} ws "]"', ways)

    def _set(self, values: Sequence[str], least: int, most: int | None) -> str:
        """Return the rule for an array in which each value is at most once."""
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            raise refused(f"it must have {least} different items of {most}", "Lower minItems.")
        names: dict[int, str] = {}
        for used in sorted(range(2 ** len(values)), key=int.bit_count, reverse=True):
            count = used.bit_count()
            comma = '"," ws ' if count else ""
            ways = [f"{comma}{value} {names[used | 1 << place]}" for place, value in enumerate(values)
                    if not used >> place & 1 and count < most]  # fmt: skip
            if count <= most:
                names[used] = self._add(" | ".join(ways + ['""'] * (count >= least)), 1)
        return self._add(f'"[" ws {names[0]} ws "]"', 1)

    def _string(self, given: Schema) -> str:
        if (key := repr(sorted(given.items()))) not in self._by_text:
            automaton = self._text(given)
            if automaton is None:
                ends = self._lengths(given)
                name = "string" if ends == (0, None) else self._add(rf'"\"" {self._chars(*ends)} "\""', 1)
            else:
                name = self._add(rf'"\"" {self._automaton(automaton, _of_string, _QUOTE)}', 1)
            self._by_text[key] = name
        return self._by_text[key]

    def _text(self, given: Schema) -> Automaton | None:
        """Return the automaton of a string's pattern and format, within its lengths; None: there is neither. With
        lengths alone, the automaton would be much larger than the rules."""
        least, most = self._lengths(given)
        patterns = [*_several(given, "pattern"), *(FORMATS[name] for name in _several(given, "format"))]
        if not patterns:
            return None
        found = reduce(intersection, map(automaton_of, patterns))
        longest = found.longest()
        if most is not None and (longest is None or longest > most):
            most = max(least, min(most, _MAX_COUNTED // len(found)))
        else:
            most = None
        return found if not least and most is None else limited(found, least, most)

    def _lengths(self, given: Schema) -> tuple[int, int | None]:
        return _whole_range(given, "minLength", "maxLength", _MAX_CHARS)

    def _chars(self, least: int, most: int | None) -> str:
        """Return `least` to `most` characters. Large numbers are made of blocks, as llama.cpp has a rule for each."""
        if (most or least) <= _MAX_REPEATED:
            self._repeat(least if most is None else most)
            return f"char{{{least},{'' if most is None else most}}}"
        size = isqrt(least if most is None else most)
        self._repeat(3 * size)
        block = self._add(f"char{{{size}}}", 1)
        begins = f"{block}{{{least // size}}} char{{{least % size}}}"
        if most is None:
            return f"{begins} char*"
        blocks, rest = divmod(most - least, size)
        few, name = self._add(f"char{{0,{size - 1}}}", 1), self._add(f"char{{0,{rest}}}", 1)
        for _ in range(blocks):
            name = self._add(f"{block} {name} | {few}", 1)
        return f"{begins} {name}"

    def _number(self, given: Schema, kind: str) -> str:
        if not KEPT["number"] & set(given):
            return kind
        if (key := repr(sorted(given.items()))) not in self._by_text:
            self._by_text[key] = self._automaton(self._decimal(given, whole=kind == "integer"), _of_number, '""')
        return self._by_text[key]

    def _decimal(self, given: Schema, *, whole: bool) -> Automaton:
        """Return the automaton of the numbers that are valid by a schema."""
        bounds = {key: _exact(key, given[key]) for key in KEPT["number"] & set(given) - {"multipleOf"}}
        low, high = (
            pick((NumberBound(bounds[key], key.startswith("exclusive")) for key in keys if key in bounds),
                 key=lambda bound: (bound.value, bound.open == (pick is max)), default=None)
            for pick, keys in ((max, ("minimum", "exclusiveMinimum")), (min, ("maximum", "exclusiveMaximum")))
        )  # fmt: skip
        multiples = [_exact("multipleOf", one) for one in _several(given, "multipleOf")]
        if any(one <= 0 for one in multiples):
            raise refused("multipleOf is not above 0", "Give a number above 0.")
        return numbers(low, high, multiples, whole=whole)

    def _automaton(self, automaton: Automaton, written_as: Callable[[Ranges], list[str]], end: str) -> str:
        """Return the name of the rule for an automaton's texts. `written_as` returns characters in GBNF; `end` stands
        behind the text."""
        if automaton.is_empty:
            raise refused("no value is valid by all the limits of a text or number", "Widen or drop one of them.")
        self._states += len(automaton)
        if self._states > _MAX_STATES:
            raise refused(f"its patterns and limits need more than {_MAX_STATES} states", "Use fewer, or simpler ones.")
        base = len(self._rules)
        for state, steps in enumerate(automaton.steps):
            by_target: dict[int, list[tuple[int, int]]] = {}
            for low, high, to in steps:
                by_target.setdefault(to, []).append((low, high))
            ways = [f"{chars} r{base + to}" for to, ranges in by_target.items() for chars in written_as(tuple(ranges))]
            self._rules[f"r{base + state}"] = " | ".join(ways + [end] * (state in automaton.accepting))
        return f"r{base}"

    def _range(self, given: Schema, low: str, high: str) -> tuple[int, int | None]:
        least, most = _whole_range(given, low, high, _MAX_REPEATED)
        self._repeat(least if most is None else most)
        return least, most

    def _repeat(self, count: int) -> None:
        self._repeated += count
        if self._repeated > _MAX_ALL_REPEATED:
            raise refused(
                f"its lengths add up to more than {_MAX_ALL_REPEATED}", "Lower or drop maxLength and maxItems."
            )


_QUOTE = r'"\""'


def _whole_range(given: Schema, low: str, high: str, limit: int) -> tuple[int, int | None]:
    """Return the least and the most that two keywords allow; no more than `limit` are written."""
    least, most = given.get(low, 0), given.get(high)
    for name, value in ((low, least), (high, most)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= 0 and value % 1 == 0):
            raise refused(f"{name} is {json.dumps(value)[:40]}", "Give a whole number.")
    if least > limit:
        raise refused(f"{low} is {least}", f"Give at most {limit}.")
    if most is not None and most < least:
        raise refused(f"{low} is {least}, and {high} {most}", "Give a range.")
    return int(least), None if most is None else min(int(most), limit)


def _several(given: Schema, key: str) -> Sequence[Any]:
    """Return the values of a keyword; none where it is not there."""
    values = several(given.get(key, ()))
    if key != "multipleOf" and not all(isinstance(one, str) for one in values):
        raise refused(f"{key} is {json.dumps(values)[:40]}", "Give a text.")
    return values


def _exact(key: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise refused(f"{key} is {json.dumps(value)[:40]}", "Give a number.")
    return Decimal(repr(value))


def _of_number(ranges: Ranges) -> list[str]:
    return [f"[{''.join(map(_span, ranges))}]"]


def _of_string(ranges: Ranges) -> list[str]:
    """Return how a JSON string has one of some characters: as it is, or escaped."""
    escaped = [char for code, char in _ESCAPED.items() if any(low <= code <= high for low, high in ranges)]
    plain = [part for one in ranges for part in _without_escaped(*one)]
    return [
        *([f"[{''.join(map(_span, plain))}]"] if plain else []),
        *([f'"\\\\" [{"".join(_code(ord(char)) for char in escaped)}]'] if escaped else []),
    ]


def _without_escaped(low: int, high: int) -> list[tuple[int, int]]:
    found, start = [], low
    for code in sorted(_ESCAPED):
        if start <= code <= high:
            if start < code:
                found.append((start, code - 1))
            start = code + 1
    return [*found, (start, high)] if start <= high else found


def _span(ends: tuple[int, int]) -> str:
    low, high = ends
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    """Return a character as a class of GBNF has it."""
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _literal(value: object) -> str:
    """Return a JSON value as a text in GBNF."""
    text = written(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.encode("utf-8", "replace").decode().replace("\x7f", "\\x7F") + '"'

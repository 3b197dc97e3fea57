"""What a JSON schema says, with its references and `allOf` merged into one, and what tells its alternatives apart."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, TypeAlias
from urllib.parse import unquote

from edgellm.engine.grammar.formats import FORMATS
from edgellm.errors import InvalidOption

Schema: TypeAlias = Mapping[str, Any]

MAX_DEPTH = 32
_MAX_MERGED, _MAX_ALTERNATIVES = 500, 64
_MAX_COMPARED, _MAX_DEPTH_COMPARED = 20_000, 8
_MAX_UNIQUE = 8  # values that an array may have once each: a state for each set of those that are left

KINDS = ("string", "integer", "number", "boolean", "null", "object", "array")
NOTES = frozenset(
    ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example",
     "deprecated", "readOnly", "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "contentSchema")
)  # fmt: skip
"""Keywords that say nothing about what is valid."""
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_VALUES = ("const", "enum", "default", "examples", "example")
KEPT = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
}  # fmt: skip
"""Keywords of each type."""
_LOWER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_HIGHER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_FIRSTS = {"string": '"', "integer": "0", "number": "0", "boolean": "t", "null": "n", "object": "{", "array": "["}


def refused(why: str, what_next: str) -> InvalidOption:
    return InvalidOption(f"The JSON schema cannot be used: {why}.", what_next)


def written(value: object) -> str:
    """Return a value as JSON, as a grammar has it."""
    return json.dumps(value, ensure_ascii=False)


def _same(value: object) -> str:
    """Return a text that is the same for equal values."""
    return written(int(value) if isinstance(value, float) and value.is_integer() else value)


def several(value: Any) -> tuple[Any, ...]:
    """Return the values of a keyword, of which a merged schema may have several: a tuple, which JSON has not."""
    return value if isinstance(value, tuple) else (value,)


def implied(given: Schema) -> str | None:
    """Return the type that keywords imply where none is named."""
    return next((kind for kind, kept in KEPT.items() if kept & set(given)), None)


def kinds_of(given: Schema) -> frozenset[str]:
    """Return the types that values of a merged schema may have."""
    if "const" in given or "enum" in given:
        return frozenset(map(_kind, listed(given)))
    kinds = given.get("type", implied(given))
    if kinds is not None and not isinstance(kinds, str | list):
        raise refused(f"{json.dumps(kinds)[:60]} is no type", f"Use one of {', '.join(KINDS)}.")
    return frozenset(KINDS if kinds is None else [kinds] if isinstance(kinds, str) else map(str, kinds))


def alternatives(given: Schema, key: str) -> list[Any]:
    """Return the schemas of `anyOf` or `oneOf`."""
    parts = given[key]
    if not isinstance(parts, list) or not parts:
        raise refused(f"{key} needs a list of schemas", "Give at least one.")
    return parts


def listed(given: Schema) -> list[Any]:
    """Return the values that `const` or `enum` name, which one of them does."""
    values = [given["const"]] if "const" in given else given["enum"]
    if not isinstance(values, list) or not values:
        raise refused("enum needs a list of values", "Give at least one.")
    return values


def _kind(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}
    return names.get(type(value), "array")


def is_kind(value: object, kind: str) -> bool:
    """Return whether a value has a type of JSON schemas."""
    own = _kind(value)
    return own == kind or (kind == "number" and own == "integer")


class SchemaReader:
    """Reads the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._merges = self._compared = 0
        self.tags = frozenset(_tags(root))  # properties that tell alternatives apart

    def target(self, ref: Any) -> Any:
        """Return what a reference refers to. Raises InvalidOption where that is not within the schema."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise refused(f"$ref is {json.dumps(ref)[:60]}", "Only references within the schema (#/$defs/NAME) work.")
        target: Any = self._root
        for part in ref.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                raise refused(f"$ref {reprlib.repr(ref)} leads nowhere", "Check the name.")
            target = target[key]
        return target

    def given(self, schema: Any) -> Schema:
        """Return a schema's keywords without notes, in one where it was to be merged of several: there is no `allOf`,
        and `$ref` only alone. Raises InvalidOption where it is no schema that can be merged."""
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise refused(f"{json.dumps(schema)[:60]} stands where a schema should", "Give an object.")
        given = {key: value for key, value in schema.items() if not _is_note(key, value)}
        if isinstance(given.get("items"), list):  # as drafts before 2020 have it
            given["prefixItems"], more = given.pop("items"), given.pop("additionalItems", None)
            given |= {} if more is None else {"items": more}
        if "allOf" not in given and ("$ref" not in given or len(given) == 1):
            return given
        return self._all([given])

    def followed(self, schema: Any) -> Schema:
        """Return a schema as `given` does, with the reference followed where it is one."""
        given = self.given(schema)
        for _ in range(MAX_DEPTH):
            if "$ref" not in given:
                return given
            given = self.given(self.target(given["$ref"]))
        raise refused("a $ref refers to itself", "Describe a value there.")

    def _all(self, schemas: Iterable[Any]) -> Schema:
        """Return one schema for the values that are valid by all."""
        found: dict[str, Any] = {}
        for part in self._parts(schemas, 0):
            found = self._both(found, part) if found else dict(part)
        return found

    def _parts(self, schemas: Iterable[Any], depth: int) -> Iterator[Schema]:
        """Yield what has to be merged, without references and `allOf`."""
        for schema in schemas:
            self._merges += 1
            if depth > MAX_DEPTH or self._merges > _MAX_MERGED:
                raise refused("what it merges contains itself, or is too much", "Merge the schemas, or simplify them.")
            if schema is True:
                continue
            if not isinstance(schema, dict):
                raise refused(f"{json.dumps(schema)[:60]} stands where a schema should", "Give an object.")
            own = {key: value for key, value in schema.items() if not _is_note(key, value)}
            ref, parts = own.pop("$ref", None), own.pop("allOf", [])
            if not isinstance(parts, list) or (not parts and "allOf" in schema):
                raise refused("allOf needs a list of schemas", "Give at least one.")
            if own:
                yield self.given(own)
            yield from self._parts([*([] if ref is None else [self.target(ref)]), *parts], depth + 1)

    def _both(self, one: Schema, other: Schema) -> dict[str, Any]:
        """Return one schema for the values that are valid by both."""
        made = self._properties(one, other)
        for key in dict.fromkeys((*one, *other)):
            if key in made:
                continue
            if key not in one or key not in other:
                made[key] = one.get(key, other.get(key))
            elif key in _LOWER | _HIGHER:
                pair = [_number(key, given[key]) for given in (one, other)]
                made[key] = min(pair) if key in _LOWER else max(pair)
            else:
                made[key] = self._joined(key, one[key], other[key])
        if ("const" in one or "enum" in one) and ("const" in other or "enum" in other):
            made.pop("const", None)
            ours = set(map(_same, listed(other)))
            made["enum"] = [value for value in listed(one) if _same(value) in ours]
        return made

    def _joined(self, key: str, one: Any, other: Any) -> Any:
        """Return the value of a keyword that two schemas have."""
        match key:
            case "const" | "enum":
                return one
            case "type":
                kinds = [kind for kind in KINDS if all(_among(kind, given) for given in (one, other))]
                if not kinds:
                    raise refused(f"no value has the types {one} and {other}", "Leave one of them out.")
                return kinds[0] if len(kinds) == 1 else kinds
            case "pattern" | "format" | "multipleOf":  # tuples, which JSON has not
                return (*several(one), *several(other))
            case "items" | "propertyNames":
                return _every(one, other)
            case "uniqueItems":
                return one or other
            case "anyOf" if isinstance(one, list) and isinstance(other, list):
                if len(one) * len(other) <= _MAX_ALTERNATIVES:
                    return [{"allOf": list(pair)} for pair in product(one, other)]
        if one == other:
            return one
        raise refused(f"{key!r} stands in several schemas of an allOf", "Merge the schemas.")

    def _properties(self, one: Schema, other: Schema) -> dict[str, Any]:
        """Return the merged keywords that say which properties an object has."""
        made: dict[str, Any] = {}
        if "required" in one and "required" in other:
            made["required"] = list(dict.fromkeys((*_list(one, "required"), *_list(other, "required"))))
        if "properties" not in one and "properties" not in other:
            if "additionalProperties" in one and "additionalProperties" in other:
                made["additionalProperties"] = _every(one["additionalProperties"], other["additionalProperties"])
            return made
        found: dict[str, Any] = {}
        for name in dict.fromkeys((*_names(one), *_names(other))):
            value = _every(
                *(_names(given).get(name, given.get("additionalProperties", True)) for given in (one, other))
            )
            if value is not False:
                found[name] = value
        more = _every(one.get("additionalProperties", True), other.get("additionalProperties", True))
        return {**made, "properties": found, "additionalProperties": more}

    def must(self, given: Schema) -> frozenset[str]:
        """Return the names of the properties that are always written: what is required, and what tells an object from
        others, which clients read it by."""
        names = _names(given)
        tags = {name for name, value in names.items()
                if name in self.tags or (isinstance(value, dict) and "const" in value)}  # fmt: skip
        return frozenset(_list(given, "required")) | tags

    def excludes(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether no value that is written by `one` is valid by `other`, as far as it is easily seen."""
        self._compared += 1
        if depth > _MAX_DEPTH_COMPARED or self._compared > _MAX_COMPARED or other is False:
            return other is False
        one, other = self.followed(one), self.followed(other)
        for key in ("anyOf", "oneOf"):
            if key in one:
                return all(self.excludes(part, other, depth + 1) for part in alternatives(one, key))
            if key in other:
                return all(self.excludes(one, part, depth + 1) for part in alternatives(other, key))
        kinds, others = kinds_of(one), kinds_of(other)
        if not any(kind in others or (kind == "integer" and "number" in others) or
                   (kind == "number" and "integer" in others) for kind in kinds):  # fmt: skip
            return True
        constant = [set(map(_same, listed(given))) for given in (one, other) if {"const", "enum"} & set(given)]
        if len(constant) == 2:
            return constant[0].isdisjoint(constant[1])
        return kinds == others == {"object"} and not constant and self._objects_apart(one, other, depth)

    def _objects_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        if "properties" not in one:
            return False
        names, others = _names(one), _names(other)
        must = self.must(one)
        if any(name not in names for name in _list(other, "required")):
            return True
        if other.get("additionalProperties") is False and any(name not in others for name in must):
            return True
        return any(
            self.excludes(names[name], others[name], depth + 1) for name in must if name in names and name in others
        )

    def firsts(self, schema: Any) -> Iterator[str]:
        """Yield what values of a schema begin with, as JSON without spaces; "0" stands for numbers. Of an object this
        is its first property, with the value where it is a constant, if that is always written."""
        seen, new = set[str](), [schema]
        for part in new:
            given = self.given(part)
            if "$ref" in given:
                if (ref := str(given["$ref"])) not in seen:
                    seen.add(ref)
                    new.append(self.target(ref))
                continue
            if key := next((key for key in ("anyOf", "oneOf") if key in given), None):
                beside = {name: value for name, value in given.items() if name != key}
                new += [_every(one, beside) if beside else one for one in alternatives(given, key)]
                continue
            yield from self._begins(given)

    def _begins(self, given: Schema) -> Iterator[str]:
        if "const" in given or "enum" in given:
            yield from (written(value) for value in listed(given))
        else:
            for kind in sorted(kinds_of(given)):
                yield from self._opening(given) if kind == "object" else [_FIRSTS.get(kind, "{")]

    def _opening(self, given: Schema) -> Iterator[str]:
        names = _names(given)
        first = next(iter(names), None)
        if first is None or first not in self.must(given):
            yield "{"
            return
        value = self.followed(names[first]) if isinstance(names[first], dict) else {}
        constants = [written(one) for one in listed(value)] if "const" in value or "enum" in value else [""]
        for constant in constants:
            yield f"{{{written(first)}:{constant}"

    def unique_values(self, given: Schema) -> list[Any] | None:
        """Return the values that the items of an array are listed to have; None if there are more than a grammar can
        keep from coming twice."""
        items = given.get("items", True)
        if "prefixItems" in given or not isinstance(items, dict):
            return None
        items = self.followed(items)
        values = listed(items) if "const" in items or "enum" in items else []
        if not values and items.get("type") == "boolean":
            values = [False, True]
        if len(items) > 1 + ("type" in items) or not 0 < len(values) <= _MAX_UNIQUE:
            return None
        return values


def unkept(schema: str) -> list[str]:
    """Return the keywords of a JSON schema, as text, that a reply may break although it follows the grammar: items
    that are to be unique where there is no short list of them, and formats that are none of `FORMATS`."""
    root = json.loads(schema)
    reader, found = SchemaReader(root), set[str]()
    new: list[Any] = [root]
    while new:
        part = new.pop()
        if isinstance(part, dict):
            if part.get("uniqueItems") is True and reader.unique_values(part) is None:
                found.add("uniqueItems")
            name = part.get("format")
            if isinstance(name, str) and name not in FORMATS and part.get("type", "string") == "string":
                found.add(f"format.{name}")
            new += [value for key, value in part.items() if key not in _VALUES]
        elif isinstance(part, list):
            new += part
    return sorted(found)


def _tags(root: Any) -> Iterator[str]:
    """Yield the properties that discriminators name."""
    new = [root]
    while new:
        part = new.pop()
        if isinstance(part, dict):
            tag = part.get("discriminator")
            if isinstance(tag, dict) and isinstance(tag.get("propertyName"), str):
                yield tag["propertyName"]
        new += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _is_note(key: str, value: Any) -> bool:
    return key in NOTES or key.startswith("x-") or (key == "format" and isinstance(value, str) and value not in FORMATS)


def _among(kind: str, given: Any) -> bool:
    named = given if isinstance(given, list) else [given]
    return kind in named or (kind == "integer" and "number" in named)


def _every(one: Any, other: Any) -> Any:
    """Return a schema for what is valid by both."""
    if one is False or other is False:
        return False
    return other if one is True else one if other is True else {"allOf": [one, other]}


def _names(given: Schema) -> dict[str, Any]:
    names = given.get("properties", {})
    if not isinstance(names, dict):
        raise refused("properties is no object", "Give a schema for each name.")
    return names


def _list(given: Schema, key: str) -> list[str]:
    values = given.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise refused(f"{key} is no list of names", "Give a list.")
    return values


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(f"{key} is {json.dumps(value)[:40]}", "Give a number.")
    return value

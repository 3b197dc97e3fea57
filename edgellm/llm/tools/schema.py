"""The JSON schema of a function's parameters, as the rule for the values of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

Tool: TypeAlias = Mapping[str, Any]
"""A function as OpenAI's API describes it: `{"type": "function", "function": {"name", "description", ...}}`."""

_MOST_PARTS = 500  # most schemas for one value: references may multiply without end
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

        try:
            return allowed(self._given)
        except RecursionError:
            return True

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

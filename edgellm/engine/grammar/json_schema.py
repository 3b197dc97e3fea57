"""JSON schemas rewritten for llguidance: what it lacks is expressed otherwise, and what would cost much is refused.

Schemas come from strangers. llguidance bounds its own work but for three things, which are bounded here: intersections
of patterns, comparisons of names, and the remainders of a division. It fetches nothing, and refuses by name the
keywords that it does not keep.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache, lru_cache
from itertools import combinations, permutations
from math import isfinite, lcm
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from edgellm.errors import InvalidOption

Schema: TypeAlias = Mapping[str, Any]

MAX_SCHEMA = 2**15  # characters of a schema as JSON
_MAX_DEPTH = 64  # levels of a schema: llguidance reads it by recursion
_MAX_PATTERNS, _MAX_MERGED_PATTERNS = 128, 8  # different patterns; intersecting n takes a time of about 2 ** n
_MAX_UNIQUE, _MAX_LISTED = 6, 500  # values of an array of unique items, and their characters
_MAX_FORMS = (
    2000  # remainders of multipleOf: a mask costs a step for each; arrays of unique items: six values make 1,957
)
_MAX_OPTIONAL = 900  # optional properties of an object: the next name costs four steps for each
_MAX_COMPARED = 64  # alternatives of a oneOf, each compared with all others
_MOST = {"minLength": 100_000, "minItems": 1000}  # limits: more fits no context
_NEAR = 10**6  # whole bounds below it are narrowed by a millionth instead of being open
_DIGITS, _DECIMALS = 10**15, 9  # bound of numbers, and most decimals: small models may write digits endlessly

_NOTES = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "discriminator", "contentMediaType", "contentEncoding", "contentSchema")
)  # fmt: skip
"""Keywords that say nothing about what is valid."""
_TYPES = {"string": str, "integer": int, "boolean": bool}
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # keywords with lists of schemas
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")
_OF_REFERENCE = "#/%~!$&'()*+,;=:@?"  # characters of a URI; names of types also have brackets
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OPEN_BOUNDS = (("exclusiveMinimum", "minimum", 1e-6, max), ("exclusiveMaximum", "maximum", -1e-6, min))
_MERGED = {"allOf", "anyOf", "oneOf", "$ref"}  # keywords that are merged with those beside them
# Neither of the two goes back where it fails, so a hostile pattern takes no longer than its length.
_AHEAD = re.compile(r"\^((?:\(\?=(?:[^()\\\[]|\\.|\[[^]]*+\])*+\))++)([^|]*+)", re.DOTALL)
_ONE_AHEAD = re.compile(r"\(\?=((?:[^()\\\[]|\\.|\[[^]]*+\])*+)\)", re.DOTALL)
_AROUND = re.compile(r"\(\?<?[=!]")
_SAME = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}  # pydantic's Decimal, without look-ahead


def refused(why: str, what_next: str) -> InvalidOption:
    return InvalidOption(f"The JSON schema cannot be used: {why}.", what_next)


def without_descriptions(schema: Any, place: str = "#") -> Any:
    """Return a JSON schema without what only readers need, of which agents send much. Its references are those of the
    `place` in another schema where it is put."""
    if isinstance(schema, list):
        return [without_descriptions(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value if name in ("enum", "const") else without_descriptions(value, place)
        for name, value in schema.items()
        if name != "description" or not isinstance(value, str)
    }
    reference = found.get("$ref")
    return found | ({"$ref": place + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else {})


def prepared(schema: str) -> dict[str, Any]:
    """Return a JSON `schema` in llguidance's dialect.

    Objects have their properties in the schema's order, and no further ones unless `properties` is left out or schemas
    are merged; properties with a constant, or named by a discriminator, are always written. Raises InvalidOption: it is
    no JSON schema, or too large.
    """
    return _prepared(schema)[0]


def unkept(schema: str) -> list[str]:
    """Return the keywords of a JSON `schema` that a reply may break although it follows the grammar: uniqueItems
    without a short list of values, and formats that `formats` lacks."""
    return _prepared(schema)[1]


@lru_cache(maxsize=16)  # a reply needs its schema where it is checked, drafted and verified
def _prepared(schema: str) -> tuple[dict[str, Any], list[str]]:
    if len(schema) > MAX_SCHEMA:
        raise refused(f"it has {len(schema)} characters; at most {MAX_SCHEMA} are allowed", "Shorten it.")
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise refused(f"it is not JSON ({str(error)[:100]})", "Send a JSON object.") from None
    reader = _Preparation({} if root is True else root)
    try:
        found: dict[str, Any] = reader.schema()
        json.dumps(found, allow_nan=False)
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise refused("a keyword has a value of a wrong type", "Check it by a validator.") from None
    return found, sorted(reader.unkept)


class _Preparation:
    """One schema on its way to llguidance."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.unkept: set[str] = set()
        self._patterns: set[str] = set()
        self._multiples: set[int] = set()
        self._merges = False
        self._forms = 0
        self._tags: set[Any] = set()  # properties that discriminators name

    def schema(self) -> Any:
        """Return the schema that stands for the whole."""
        self._survey(self._root, 0)
        found = self._of(self._root)
        if len(self._patterns) > (most := _MAX_MERGED_PATTERNS if self._merges else _MAX_PATTERNS):
            raise refused(
                f"it has {len(self._patterns)} patterns and formats{' and merges schemas' if self._merges else ''}",
                f"Use at most {most} different ones.",
            )
        if (lcm(*self._multiples) if self._merges else max(self._multiples, default=1)) > _MAX_FORMS:
            raise refused("multipleOf is too large, or has too many digits", f"Use at most {_MAX_FORMS}.")
        return found

    def _survey(self, schema: Any, depth: int) -> None:
        """Collect what holds for the whole schema."""
        if depth > _MAX_DEPTH:
            raise refused(f"it is more than {_MAX_DEPTH} levels deep", "Use references, or fewer levels.")
        if not isinstance(schema, dict):
            if not isinstance(schema, bool) or not depth:
                raise refused(f"{json.dumps(schema)[:60]} stands where a schema should", "Give an object.")
            return
        said = set(schema) - _NOTES - {"$defs", "definitions"}
        parts = schema.get("allOf")
        self._merges |= bool(said & _MERGED) and (len(said) > 1 or (isinstance(parts, list) and len(parts) > 1))
        if isinstance(tag := schema.get("discriminator"), dict) and isinstance(name := tag.get("propertyName"), str):
            self._tags.add(name)
        ref = schema.get("$ref", "#")
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise refused(f"$ref is {json.dumps(ref)[:60]}", "Only references within the schema (#/$defs/NAME) work.")
        _mapped(schema, lambda part: self._survey(part, depth + 1))

    def _of(self, schema: Any) -> Any:
        """Return the schema in llguidance's dialect that stands for `schema`."""
        if not isinstance(schema, dict):
            return schema
        made = {key: value for key, value in schema.items() if key not in _NOTES and not key.startswith("x-")}
        if "$ref" in made:
            made["$ref"] = quote(made["$ref"], safe=_OF_REFERENCE)
        self._check_numbers(made)
        self._names(made)
        self._object(made)
        self._array(made)
        more = self._text(made)
        if isinstance(options := made.get("oneOf"), list) and "anyOf" not in made and self._all_apart(options):
            made["anyOf"] = made.pop("oneOf")
        made = _mapped(made, self._of)
        if more:
            made["allOf"] = [*made.get("allOf", []), *more]
        elif set(made) == {"allOf"} and isinstance(made["allOf"], list) and len(made["allOf"]) == 1:
            return made["allOf"][0]
        return made

    def _check_numbers(self, made: dict[str, Any]) -> None:
        for key, most in _MOST.items():
            if isinstance(least := made.get(key), int | float) and least > most:
                raise refused(f"{key} is {least}", f"Give at most {most}.")
        if any(isinstance(made.get(key), bool) for key in _BOUNDS):
            raise refused("exclusiveMinimum or exclusiveMaximum is true or false", "Give the number.")
        multiple = made.get("multipleOf")
        if isinstance(multiple, int | float) and isfinite(multiple):
            digits = "".join(map(str, Decimal(repr(multiple)).as_tuple().digits)).strip("0")
            self._multiples.add(int(digits or 0))
        for bound, plain, nearest, tighter in _OPEN_BOUNDS:  # llguidance lets 0 through where x > 0 and x <= 0.5
            if made.get("type") != "integer" and abs(limit := made.get(bound, 0.5)) < _NEAR and limit == int(limit):
                made[plain] = tighter(made.get(plain, made.pop(bound)), limit + nearest)
        limits = [made.get(key, 0) for key in _BOUNDS]
        kinds = made.get("type", ())
        if ("number" in kinds or "integer" in kinds) and all(abs(limit) < _DIGITS for limit in limits):
            made.setdefault("minimum", 1 - _DIGITS)
            made.setdefault("maximum", _DIGITS - 1)
            if "number" in kinds and all(round(limit, _DECIMALS) == limit for limit in limits):
                made.setdefault("multipleOf", 10**-_DECIMALS)

    def _object(self, made: dict[str, Any]) -> None:
        if isinstance(made.get("properties"), dict):
            made["required"] = self._always(made)
        if (least := made.get("minProperties", 0)) <= len(made.get("required", ())):
            made.pop("minProperties", None)
        elif least > 1:
            raise refused(f"minProperties is {least}", "Give at most 1: a name that comes twice is one property.")
        if not {"properties", "patternProperties"} & set(made):
            return
        if not self._merges and made.get("additionalProperties", True) is True:
            made["additionalProperties"] = False
            if "patternProperties" not in made:
                made["properties"] = properties = dict(made["properties"])
                for name in made.get("required", ()):
                    properties.setdefault(name, True)
        if (optional := len(set(_properties(made)) - set(made.get("required", ())))) > _MAX_OPTIONAL:
            raise refused(f"an object has {optional} properties that need not come", f"Use at most {_MAX_OPTIONAL}.")
        if made.get("additionalProperties") is False and made.get("maxProperties", -1) >= len(_properties(made)) > 0:
            del made["maxProperties"]

    def _always(self, schema: Schema) -> list[str]:
        """Return the names of the properties that are written in any case."""
        tags = [name for name, value in _properties(schema).items()
                if name in self._tags or "const" in self._followed(value)]  # fmt: skip
        return list(dict.fromkeys([*schema.get("required", []), *tags]))

    def _names(self, made: dict[str, Any]) -> None:
        """Say `propertyNames` by properties, or by a pattern of names."""
        if made.get("propertyNames", False) is False or {"properties", "patternProperties"} & set(made):
            return
        names = self._followed(made["propertyNames"])
        said, pattern = set(names) - _NOTES - {"type"}, names.get("pattern")
        if said == {"enum"}:
            made["properties"] = {str(name): made.get("additionalProperties", True) for name in names["enum"]}
            made["additionalProperties"] = False
        elif said and said <= {"minLength", "maxLength"}:
            pattern = f"(?s)^.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        elif said == {"format"} and names["format"] in formats():
            pattern = formats()[names["format"]]
        elif said - {"pattern"}:
            return
        del made["propertyNames"]
        if pattern is not None:
            made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
            made["additionalProperties"] = False

    def _array(self, made: dict[str, Any]) -> None:
        if made.pop("uniqueItems", False) is not True:
            return
        values = _listed(self._followed(made.get("items", True)))
        if values is None or "prefixItems" in made or self._forms > _MAX_FORMS:
            self.unkept.add("uniqueItems")
            return
        counts = range(int(made.pop("minItems", 0)), int(min(made.pop("maxItems", len(values)), len(values))) + 1)
        del made["items"]
        made["enum"] = [list(some) for count in counts for some in permutations(values, count)]
        self._forms += len(made["enum"])

    def _text(self, made: dict[str, Any]) -> list[Schema]:
        """Take the pattern and the format out of a schema; return schemas for what it cannot hold itself."""
        patterns = []
        local = made.get("format") == "time" and "pattern" in made  # zod has no offset there
        if isinstance(name := made.pop("format", None), str) and name in formats() and not local:
            patterns.append(formats()[name])
        elif isinstance(name, str) and made.get("type", "string") == "string":
            self.unkept.add(f"format.{name}")
        if isinstance(pattern := made.get("pattern"), str):
            pattern = _SAME.get(pattern, pattern)
            if split := _AHEAD.fullmatch(pattern):
                patterns += [f"^(?:{ahead})" for ahead in _ONE_AHEAD.findall(split[1])]
                pattern = f"^{split[2]}"
            if patterns and _AROUND.search(pattern):  # zod repeats a format as a pattern
                self.unkept.add("pattern")
            else:
                patterns.append(pattern)
        by_name = made.get("patternProperties")
        self._patterns.update(patterns, by_name if isinstance(by_name, dict) else ())
        if len(patterns) > _MAX_MERGED_PATTERNS:
            raise refused("a pattern looks ahead too often", f"Use at most {_MAX_MERGED_PATTERNS - 2} look-aheads.")
        if patterns:
            made["pattern"] = patterns.pop()
        return [{"pattern": pattern} for pattern in patterns]

    def _followed(self, schema: Any) -> Schema:
        """Return the schema that references lead to; an empty one where they lead nowhere."""
        for _ in range(_MAX_DEPTH):
            said = (
                {key: value for key, value in schema.items() if key not in _NOTES} if isinstance(schema, dict) else {}
            )
            if set(said) == {"allOf"} and isinstance(parts := said["allOf"], list) and len(parts) == 1:
                schema = parts[0]  # an allOf of one is how a reference gets notes
                continue
            if set(said) != {"$ref"} or not isinstance(said["$ref"], str):
                break
            schema = self._root
            for part in unquote(said["$ref"]).split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(key) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {}

    def _all_apart(self, options: Sequence[Any]) -> bool:
        followed = [self._followed(option) for option in options]
        return len(options) <= _MAX_COMPARED and all(self._apart(*pair) for pair in combinations(followed, 2))

    def _apart(self, one: Schema, other: Schema) -> bool:
        """Return whether it is easily seen that no value is valid by both schemas."""
        kinds, others = _kinds(one), _kinds(other)
        if kinds and others and not kinds & others:
            return True
        values, their = _values(one), _values(other)
        if values and their:
            return not values & their
        if kinds != {"object"} or others != {"object"}:
            return False
        ours, theirs, always = _properties(one), _properties(other), set(self._always(one)) & set(self._always(other))
        shared = [(_values(self._followed(ours[name])), _values(self._followed(theirs[name])))
                  for name in always if name in ours and name in theirs]  # fmt: skip
        if any(left and right and not left & right for left, right in shared):
            return True
        lacking = (set(one.get("required", ())) - set(theirs), set(other.get("required", ())) - set(ours))
        return all(lacking) and not self._merges  # each schema requires a property that the other never writes


def _mapped(schema: Schema, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with `change` applied to each schema within."""
    made = dict(schema)
    for key in _NAMED:
        if isinstance(named := made.get(key), dict):
            made[key] = {name: change(part) for name, part in named.items()}
    for key in _LISTED:
        if isinstance(listed := made.get(key), list):
            made[key] = [change(part) for part in listed]
    for key in _SINGLE:
        if isinstance(single := made.get(key), dict | bool):
            made[key] = change(single)
    return made


def _kinds(schema: Schema) -> set[str]:
    kinds = schema.get("type", [])
    named = {kinds} if isinstance(kinds, str) else set(map(str, kinds))
    return {"number" if kind == "integer" else kind for kind in named}


def _listed(items: Schema) -> list[Any] | None:
    """Return the values of items that are a few short values of one type, or of any; otherwise None."""
    kind, values = items.get("type"), items.get("enum", [False, True])
    alike = kind is None or all(type(value) is _TYPES.get(str(kind)) for value in values)
    listed = "enum" in items or kind == "boolean"
    small = len(values) <= _MAX_UNIQUE and len(json.dumps(values)) <= _MAX_LISTED
    return list(values) if listed and alike and small and set(items) - _NOTES <= {"type", "enum"} else None


def _values(schema: Schema) -> set[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return {json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value) for value in values}


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
)  # fmt: skip
_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:{_DAYS})|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_CLOCK})"
_SECONDS = r"\d{1,4}S"
_MINUTES = rf"\d{{1,4}}M(?:{_SECONDS})?"
_HOURS = rf"\d{{1,4}}H(?:{_MINUTES})?"
_OF_DAY = rf"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_DAY = r"\d{1,4}D"
_MONTH = rf"\d{{1,4}}M(?:{_DAY})?"
_DURATION = rf"P(?:(?:{_DAY}|{_MONTH}|\d{{1,4}}Y(?:{_MONTH})?)(?:{_OF_DAY})?|{_OF_DAY}|\d{{1,4}}W)"
_HEX = r"[0-9A-Fa-f]"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = rf"{_HEX}{{1,4}}"
_IPV6 = (
    rf"(?:(?:{_H}:){{7}}{_H}|(?:{_H}:){{1,7}}:|(?:{_H}:){{1,6}}:{_H}|(?:{_H}:){{1,5}}(?::{_H}){{2}}"
    rf"|(?:{_H}:){{1,4}}(?::{_H}){{3}}|(?:{_H}:){{1,3}}(?::{_H}){{4}}|(?:{_H}:){{1,2}}(?::{_H}){{5}}"
    rf"|{_H}:(?::{_H}){{6}}|:(?:(?::{_H}){{1,7}}|:))"
)
_LABEL = r"[a-z0-9]{1,12}(?:-[a-z0-9]{1,12}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}\.[a-z]{{2,12}}"
_LOCAL_PART = r"[A-Za-z0-9_+-]{1,20}(?:\.[A-Za-z0-9_+-]{1,20}){0,2}"
_OF_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})"
_URI = (
    rf"https?://(?:{_HOST}|localhost|{_IPV4})(?::[1-9]\d{{0,3}})?(?:/{_OF_PATH}{{0,80}})?"
    rf"(?:\?{_OF_PATH}{{0,40}})?(?:#{_OF_PATH}{{0,20}})?"
)


@cache
def formats() -> Mapping[str, str]:
    """Return the patterns of the formats of strings that a grammar keeps, by name.

    Where a format allows more than clients read, the pattern is narrower: names in addresses have a limited length,
    times have an offset (RFC 3339), and URIs are HTTP's.
    """
    uuid = rf"{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-%s{_HEX}{{3}}-{_HEX}{{12}}"
    base64 = "(?:%(c)s{4})*(?:%(c)s[AQgw]==|%(c)s{2}[AEIMQUYcgkosw048]=)?"
    plain, for_urls = (base64 % {"c": f"[A-Za-z0-9{more}]"} for more in ("+/", "_-"))
    found = {
        "date": _DATE, "time": _TIME, "date-time": rf"{_DATE}T{_TIME}", "duration": _DURATION,
        "uuid": uuid % (_HEX, _HEX), **{f"uuid{version}": uuid % (version, "[89abAB]") for version in range(1, 9)},
        **dict.fromkeys(("email", "idn-email"), rf"{_LOCAL_PART}@{_HOST}"),
        **dict.fromkeys(("hostname", "idn-hostname"), _HOST),
        "ipv4": _IPV4, "ipv6": _IPV6, "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
        **dict.fromkeys(("uri", "iri", "uri-reference", "iri-reference"), _URI),
        "json-pointer": r"(?:/(?:[^~/]|~[01])*)*", "base64": plain, "byte": plain, "base64url": for_urls,
    }  # fmt: skip
    return {name: f"^{pattern}$" for name, pattern in found.items()}

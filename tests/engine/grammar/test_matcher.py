"""JSON schemas as grammars: what follows one is valid, and hostile ones are refused before they cost anything."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from time import process_time
from typing import Any
from uuid import UUID

import jsonschema_rs
import numpy as np
import pytest
from pydantic import UUID4, AnyUrl, Base64Bytes, Base64UrlBytes, IPvAnyAddress, TypeAdapter

from edgellm.engine import Model
from edgellm.engine.grammar.json_schema import MAX_SCHEMA, formats, unkept
from edgellm.engine.grammar.matcher import Grammar
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import EngineFailed, InvalidOption

NAMES = ("a", "é ü", '"\\', "日本", "a b/c~d")
LEAVES: list[Any] = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null")),
    {"type": ["string", "null"], "description": "a note"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 3000},
    *({"type": "string", "format": name} for name in sorted(formats())),
    *({"type": "string", "pattern": pattern, "maxLength": 12}
      for pattern in ("^[a-z]+$", r"^\d{3}-[A-Z]$", "(a|b)c", r"^(?=.*\d)\S{2,6}$", '^["\\\\]+$')),
    {"type": "integer", "minimum": -20, "maximum": 7},
    {"type": "integer", "exclusiveMinimum": 17},
    *({"type": "integer", "minimum": -999, "multipleOf": of} for of in (2, 5, 100)),
    *({"type": "number", "multipleOf": of} for of in (0.01, 0.5, 10)),
    *({"type": "number", "exclusiveMinimum": least / 8, "maximum": 5.25} for least in (-99, -3, 0)),
    {"enum": ["a", -3, True, None]},
    {"const": '"\\'},
    {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True, "minItems": 1},
]  # fmt: skip


def made(rng: random.Random, depth: int = 2) -> Any:
    """Return a random schema of up to so many levels over its leaves."""
    if not depth or rng.random() < 0.3:
        return rng.choice(LEAVES)
    parts = [made(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    names = rng.sample(NAMES, len(parts))
    return rng.choice([
        {"type": "object", "properties": dict(zip(names, parts, strict=True)),
         "required": names[: rng.randint(0, len(names))], "additionalProperties": False},
        {"type": "array", "items": parts[0], "minItems": rng.randint(0, 2), "maxItems": 3},
        {"anyOf": parts},
        {"type": "array", "prefixItems": parts, "items": False},
        {"type": "array", "prefixItems": parts[:2], "items": parts[-1], "minItems": 1, "maxItems": 4},
        {"type": "object", "additionalProperties": parts[0], "minProperties": 1,
         "propertyNames": rng.choice([{"enum": ["a", "b"]}, {"pattern": "^x"}, {"maxLength": 3}])},
        {"allOf": [parts[0], {"title": "A note"}]},
    ])  # fmt: skip


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as opened:
        yield opened


def written(model: Model, grammar: Grammar, seed: int, most: int = 400) -> str | None:
    """Text of random tokens that the grammar allows; None if it does not end in time, or its bytes are no text."""
    rng = np.random.default_rng(seed)
    ids = np.empty(0, dtype=np.int32)
    for _ in range(most):
        allowed = np.flatnonzero(grammar.mask(ids))
        ends = [token for token in allowed.tolist() if model.is_eog(token)]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.5):
            try:
                return model.detokenize(ids).decode()
            except UnicodeDecodeError:  # random bytes: the grammar counts them otherwise than their replacements
                return None
        closing = [token for token in allowed.tolist() if re.match(rb'["\]}]', model.piece(token))]
        choices = closing if closing and rng.random() < 0.3 else [t for t in allowed.tolist() if t not in ends]
        ids = np.append(ids, np.int32(rng.choice(choices)))
    return None


def test_json_is_compact_and_whole(model: Model) -> None:
    """No blank between values, no escape by number (half a character is possible with it), no control token."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a", "b"]}
    grammar = model.grammar(json.dumps(schema))
    vocabulary, opened = model.vocabulary, model.tokenize('{"a":"')
    assert not any(vocabulary.pieces[token][:1].isspace() for token in np.flatnonzero(grammar.mask(opened[:0])))
    inside = {vocabulary.pieces[token] for token in np.flatnonzero(grammar.mask(opened)).tolist()}
    assert b" " in inside
    assert not inside & {vocabulary.pieces[token] for token in vocabulary.markup()}
    escaped = grammar.mask(np.concatenate((opened, model.tokenize("\\"))).astype(np.int32))
    assert not any(vocabulary.pieces[token][:1] in (b"u", b"U") for token in np.flatnonzero(escaped))


@pytest.mark.parametrize("seed", range(60))
def test_what_follows_a_grammar_is_valid(model: Model, seed: int) -> None:
    schema = made(random.Random(seed))
    text = written(model, model.grammar(json.dumps(schema)), seed)
    if text is not None:
        assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"type": "object"}, '{"a": [1, {"b": null}], "c": "\\n"}'),
        ({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"]}}}, '{"value": 1, "next": {"value": -2, "next": null}}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}, '{"b": "x"}'),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x": 1, "y": 2}'),
        ({"$ref": "#/$defs/box", "$defs": {  # as pydantic describes a union of models in a model
            "cat": {"type": "object", "properties": {"meow": {"type": "string"}}, "required": ["meow"]},
            "dog": {"type": "object", "properties": {"bark": {"type": "integer"}}, "required": ["bark"]},
            "box": {"type": "object", "required": ["pet"], "properties": {
                "pet": {"anyOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}}}}}, '{"pet": {"bark": 3}}'),
        ({"$ref": "#/$defs/an%20id", "$defs": {"an id": {"type": "null"}}}, "null"),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}, '{"a":1,"b":2}'),
        ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)\S{4,}$"}, '"Ab1cd"'),
        ({"type": "string", "pattern": r"^\p{L}+$"}, '"Zoë"'),
        ({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string",
            "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}, '"3.14"'),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"type": "null"}}, "required": ["y"]}], "$defs": {
            "a": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}, '{"x":1,"y":null}'),
        ({"oneOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                    {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}, '{"b":null}'),
        ({"oneOf": [{"$ref": "#/$defs/sum"}, {"$ref": "#/$defs/n"}], "discriminator": {"propertyName": "kind"},
          "$defs": {
            "n": {"type": "object", "properties": {"kind": {"const": "n"}}, "required": ["kind"]},
            "sum": {"type": "object", "properties": {"kind": {"const": "sum"}, "of": {"$ref": "#", "description": "A"}},
                    "required": ["kind", "of"]}}}, '{"kind":"sum","of":{"kind":"n"}}'),
        ({"properties": {"b": {}, "a": {}}, "required": ["a", "more"]}, '{"b":1,"a":2,"more":3}'),
        ({"properties": [], "required": ["a"]}, '{"a":1}'),  # as PHP writes an empty object
        ({"propertyNames": {"enum": ["b", "a"]}, "additionalProperties": {"type": "null"}, "required": ["a", "b"]},
         '{"b":null,"a":null}'),
        ({"$ref": "#/$defs/Page[a b]", "$defs": {"Page[a b]": {"const": 1}}}, "1"),
        ({"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([a-z'\.]*)[a-z]@([a-z]+\.)+[a-z]{2,}$"},
         '"a.b@example.org"'),
        ({"type": "string", "format": "duration", "pattern": r"^P(?!.*W)(?=\d|T\d)(\d+D)?(T\d+H)?$"}, '"P1DT2H"'),
        ({"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}, '"09:30"'),
        ({"type": "array", "items": [{"type": "integer"}, {"format": "date"}], "additionalItems": False, "minItems": 2},
         '[1,"2020-02-29"]'),
        ({"type": "integer", "minimum": 1}, "17"),
        ({"enum": ['"', "\\", "é"]}, '"\\\\"'),
    ],
    ids=str,
)  # fmt: skip
def test_a_valid_text_is_allowed_and_ends(model: Model, schema: Any, valid: str) -> None:
    compact = json.dumps(json.loads(valid), separators=(",", ":"), ensure_ascii=False)
    grammar, ids, end = model.grammar(json.dumps(schema)), model.tokenize(compact), model.end_of_turn
    assert all(grammar.mask(ids[:n])[ids[n]] for n in range(len(ids)))
    assert grammar.mask(ids)[end]
    assert not grammar.mask(ids[:-1])[end] or schema == {"type": "integer", "minimum": 1}


def test_what_a_schema_leaves_no_choice_about(model: Model) -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string"}, "n": {"type": "integer"}}}
    grammar = model.grammar(json.dumps(schema | {"required": ["day", "n"], "additionalProperties": False}))
    forced = {"": b'{"day":"', '{"d': b'ay":"', '{"day":"': b"", '{"day":"x",': b'"n":', '{"day":"x","n":5}': b""}
    for text, found in forced.items():
        assert grammar.forced(model.tokenize(text)) == found, text
    whole = model.tokenize('{"day":"x","n":5}')
    assert grammar.forced(np.append(whole, np.array([model.end_of_turn], np.int32))) == b""
    assert grammar.mask(whole)[model.end_of_turn], "asking has changed nothing"


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "number", "minimum": 0}, ["-1", "-0"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}, ["0", "1.6", "2", "0.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0"]),
        ({"type": "number", "minimum": -0.25, "exclusiveMaximum": 0}, ["0", "-0"]),
        ({"type": "integer", "exclusiveMinimum": 0}, ["0", "-3"]),
        ({"type": "integer", "multipleOf": 5}, ["3", "52"]),
        ({"type": "string", "pattern": "^a+$"}, ['"b"', '"ab"', '""']),
        ({"type": "string", "format": "date"}, ['"2024-02-30"', '"soon"']),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
         ['["a"', "[1]", '[1,"a",2]', "[]"]),
        ({"type": "array", "items": {"enum": ["a", 1], "type": "string"}, "uniqueItems": True}, ["[1]", '["a",1]']),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["a","a"]', '["a","b","a"]']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"b":1}']),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"b":1}', '{"a":"x"}']),
        ({"type": "object", "minProperties": 1, "maxProperties": 1}, ["{}", '{"a":1,"b":2}']),
        ({"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}}, ["{}", '{"age":1}']),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["2", "6"]),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
          "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ["{}"]),
        ({"type": "string", "enum": ["a", "bb", 1], "minLength": 2}, ['"a"', "1"]),
        ({"type": "string", "minLength": 1500, "maxLength": 1600}, ['"a"']),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_valid_is_not_allowed(model: Model, schema: Any, refused: list[str]) -> None:
    for text in refused:
        grammar, ids = model.grammar(json.dumps(schema)), model.tokenize(text)
        allowed = all(grammar.mask(ids[:n])[ids[n]] for n in range(len(ids)))  # up to the first that is refused
        assert not (allowed and grammar.mask(ids)[model.end_of_turn]), text


def test_what_a_grammar_cannot_keep_is_named() -> None:
    schema = {"type": "object", "properties": {
        "format": {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True},
        "few": {"type": "array", "items": {"$ref": "#/$defs/few"}, "uniqueItems": True},
        "when": {"type": "string", "format": "date"}}, "$defs": {"few": {"enum": [1, 2]}}}  # fmt: skip
    assert unkept(json.dumps(schema)) == ["format.path", "uniqueItems"]
    assert unkept('{"type": "object", "default": {"uniqueItems": true}}') == []


def test_the_state_follows_drafts_and_goes_back(model: Model) -> None:
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    ids, other = model.tokenize('{"name":"Ada Lovelace"}'), model.tokenize('{"name":"B')
    grammar = model.grammar(schema)
    rng = np.random.default_rng(1)
    for n in rng.integers(0, len(ids), 40).tolist():
        for text in (ids[:n], other[: n % len(other)]):
            assert np.array_equal(grammar.mask(text), model.grammar(schema).mask(text))


def test_a_text_that_breaks_the_grammar_is_an_error_and_not_the_end_of_the_process(model: Model) -> None:
    grammar = model.grammar('{"type": "object"}')
    end = np.array([model.end_of_turn], np.int32)
    for text in (model.tokenize("Hello"), end, np.append(model.tokenize("{}"), model.tokenize("{}")).astype(np.int32)):
        with pytest.raises(EngineFailed, match="breaks its grammar"):
            grammar.mask(text)
    assert grammar.mask(model.tokenize("{}"))[end].all()


READ_AS: dict[str, Any] = {
    "date": date, "time": time, "date-time": datetime, "duration": timedelta, "uuid": UUID, "uuid4": UUID4,
    "ipv4": IPv4Address, "ipv6": IPv6Address, "ipvanyaddress": IPvAnyAddress, "uri": AnyUrl, "base64": Base64Bytes,
    "base64url": Base64UrlBytes,
}  # fmt: skip


@pytest.mark.parametrize("name", formats())
def test_texts_of_a_format_are_valid(model: Model, name: str) -> None:
    schema = {"type": "string", "format": name}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    texts = [text for seed in range(12) if (text := written(model, model.grammar(json.dumps(schema)), seed))]
    assert texts
    for text in texts:
        assert validator.is_valid(json.loads(text)), text
        if name in READ_AS:
            TypeAdapter(READ_AS[name]).validate_json(text)


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[Any] = [
    nested(100),
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9},
    {"type": "integer", "minimum": 5, "exclusiveMaximum": 5},
    {"type": "integer", "exclusiveMinimum": True, "minimum": 5},
    {"type": "integer", "multipleOf": 100_003},
    {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    {"type": "number", "multipleOf": 0},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [pattern(f"[a-z]*{chr(97 + n)}[a-z]{{{n}}}") for n in range(26)]},
    pattern("^" + "".join(f"(?=.*{chr(97 + n)}.{{{n}}})" for n in range(20)) + ".*$"),
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"oneOf": 5}, {}]},
    {"oneOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
    {"oneOf": [{"type": "object", "properties": {"a": {"enum": [n]}}} for n in range(2)]},
    {"type": "object", "minProperties": 2},
    {"if": {"type": "string"}, "then": {"maxLength": 5}},
    {"type": "array", "contains": {"type": "string"}},
    {"type": "object", "patternProperties": {"^a": True, "b$": True}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "propertyNames": False},
    {"type": "object", "properties": {f"p{n}": {} for n in range(1100)}},
    {"type": "object", "propertyNames": {"enum": [f"p{n}" for n in range(1100)]}},
    {"properties": {"a": {}}, "required": [{}]},
    {"type": "object", "propertyNames": {"allOf": [pattern("^a")], "maxLength": 3}},
    {"type": "string", "enum": [1, 2]},
    {"$ref": "https://example.org/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "#/nowhere"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {f"p{n}": {"enum": [n, n + 1]} for n in range(2500)}},
    {"type": "object", "patternProperties": {f"^a{n}x": {} for n in range(300)}},
    pattern(r"(a)\1$"),
    pattern("^(?=" + "[a]" * 5000),
    {"type": "object", "properties": [1]},
    {"type": "banana"},
    {"type": []},
    {"enum": []},
    {"anyOf": 5},
    {"not": {}},
    {"items": 7},
    {"type": 7},
    {"required": True},
    {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": "many"},
    5,
    "text",
]  # fmt: skip


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: str(schema)[:40])
def test_what_cannot_be_kept_or_costs_too_much_is_refused_at_once(model: Model, schema: Any) -> None:
    began = process_time()
    with pytest.raises(InvalidOption, match="schema"):
        model.grammar(json.dumps(schema))
    assert process_time() - began < 2.0


TWINS = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 9}]}
COSTLY: list[Any] = [
    TWINS,
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": n + 1} for n in range(200)]},
    {"type": "object", "properties": {f"p{n}": pattern(f"x{{{n + 900}}}") for n in range(9)}},
    {"type": "object", "properties": {f"p{n}": pattern(f"(x|y|z)*x(x|y|z){{{n + 20}}}") for n in range(60)}},
    {"anyOf": [pattern(f"(\\w|{n})*{n % 10}(\\w){{{n + 5}}}") for n in range(100)]},
    {"anyOf": [{"type": "string", "maxLength": 1000 + n} for n in range(200)]},
    {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(300)]},
    {"type": "object", "properties": {f"p{n}": {} for n in range(1900)}},
    {"allOf": [{"anyOf": [{"const": n} for n in range(20)]} for _ in range(60)]},
    {"allOf": [{"anyOf": [{"properties": {f"a{m}{n}": {}}} for n in range(4)]} for m in range(12)]},
    {"allOf": [pattern("|".join(f"[a-z]*{chr(97 + (n * 3 + i) % 26)}[a-z]{{{i}}}" for i in range(12)))
               for n in range(8)]},
    {"type": "array", "maxItems": 10**9, "items": {"type": "array", "maxItems": 10**9}},
    {"enum": [f"{n:05x}" * 2 for n in range(2200)]},
    {"type": "array", "items": {"anyOf": [{"type": "number", "minimum": n / 7, "maximum": n + 1} for n in range(400)]}},
    pattern("(a|b)*a(a|b){30}"),
    pattern("((((((a{0,100}){0,100}){0,100}){0,100})*b)*c)*"),
    pattern("(((a|b){1000}){1000}){1000}"),
    {"oneOf": [{"type": "object", "properties": {f"a{n}": {"const": n}}} for n in range(600)]},
    {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
                                     for n in range(250)} | {"d250": {}}},
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("schema", COSTLY, ids=lambda schema: str(schema)[:40])
def test_a_costly_schema_is_followed_within_limits_or_refused(model: Model, schema: Any) -> None:
    began = process_time()
    with suppress(InvalidOption):
        written(model, model.grammar(json.dumps(schema)), 1, most=40)
    assert process_time() - began < 2.0


@pytest.mark.parametrize("text", ["", "{", "[" * 20000, "{" * 50, "x" * (MAX_SCHEMA + 1), "NaN"])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="JSON schema"):
        unkept(text)


def test_a_vocabulary_alone_does_for_a_grammar(model: Model, verifier_path: Path) -> None:
    """The device that asks over a mesh has no weights, and judges what a schema allows."""
    schema, nothing = '{"type": "object"}', np.empty(0, np.int32)
    with Model.load(verifier_path, TEXT_ONLY) as text:
        allowed = text.grammar(schema).mask(nothing)
    assert np.array_equal(allowed, model.grammar(schema).mask(nothing))
    assert allowed.any()

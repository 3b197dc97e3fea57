"""JSON schemas as grammars: what follows one is valid, and hostile ones are refused before they cost anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Model
from edgellm.engine.grammar import MAX_SCHEMA, Grammar, to_gbnf
from edgellm.errors import EngineFailed, InvalidOption

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=6)
leaves: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind}),
    st.tuples(st.integers(0, 3), st.integers(3, 8)).map(
        lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[1]}
    ),
    st.tuples(st.integers(-20, 0), st.integers(0, 20)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.lists(names | st.integers(-9, 9) | st.booleans() | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    (names | st.integers(-9, 9)).map(lambda value: {"const": value}),
    st.just({"type": ["string", "null"], "description": "a note"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    described = st.dictionaries(names, inner, min_size=1, max_size=4)
    return described.flatmap(
        lambda properties: st.lists(st.sampled_from(sorted(properties)), unique=True).map(
            lambda required: {"type": "object", "properties": properties, "required": required,
                              "additionalProperties": False}
        )
    )  # fmt: skip


schemas: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        objects(inner)
        | st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[2]}
        )
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as opened:
        yield opened


def written(model: Model, grammar: Grammar, seed: int, most: int = 400) -> str | None:
    """Text of random tokens that the grammar allows; None if it does not end in time, or its bytes are no text."""
    rng = np.random.default_rng(seed)
    ids = np.empty(0, dtype=np.int32)
    everything = np.arange(model.n_vocab, dtype=np.int32)
    for _ in range(most):
        allowed = everything[grammar.allowed(ids, everything)]
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


@given(schema=schemas, seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_what_follows_a_grammar_is_valid(model: Model, schema: Any, seed: int) -> None:
    text = written(model, model.grammar(json.dumps(schema)), seed)
    if text is not None:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


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
        ({"type": "integer", "minimum": 1}, "17"),
        ({"enum": ['"', "\\", "é"]}, '"\\\\"'),
    ],
    ids=str,
)  # fmt: skip
def test_a_valid_text_is_allowed_and_ends(model: Model, schema: Any, valid: str) -> None:
    grammar, ids, end = model.grammar(json.dumps(schema)), model.tokenize(valid), model.end_of_turn
    assert all(grammar.allowed(ids[:n], ids[n : n + 1])[0] for n in range(len(ids)))
    assert grammar.allowed(ids, np.array([end], np.int32))[0]
    assert not grammar.allowed(ids[:-1], np.array([end], np.int32))[0] or schema == {"type": "integer", "minimum": 1}


def test_the_state_follows_drafts_and_goes_back(model: Model) -> None:
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    ids, other = model.tokenize('{"name": "Ada Lovelace"}'), model.tokenize('{"name": "B')
    grammar, everything = model.grammar(schema), np.arange(model.n_vocab, dtype=np.int32)
    rng = np.random.default_rng(1)
    for n in rng.integers(0, len(ids), 40).tolist():
        for text in (ids[:n], other[: n % len(other)]):
            fresh = model.grammar(schema).allowed(text, everything)
            assert np.array_equal(grammar.allowed(text, everything), fresh)


def test_a_text_that_breaks_the_grammar_is_an_error_and_not_the_end_of_the_process(model: Model) -> None:
    grammar = model.grammar('{"type": "object"}')
    end = np.array([model.end_of_turn], np.int32)
    for text in (model.tokenize("Hello"), end, np.append(model.tokenize("{}"), model.tokenize("{}")).astype(np.int32)):
        with pytest.raises(EngineFailed, match="breaks its grammar"):
            grammar.allowed(text, end)
    assert grammar.allowed(model.tokenize("{}"), end)[0]


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


TWINS = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 9}]}
HOSTILE: list[Any] = [
    nested(100),
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "minItems": 10**9},
    {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 1000} for n in range(11)}},
    {"type": "integer", "minimum": 0, "maximum": 10**12},
    {"$ref": "https://example.org/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "#/nowhere"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/twins", "$defs": {"twins": {"anyOf": [
        {"type": "array", "items": {"$ref": "#/$defs/twins"}},
        {"type": "array", "items": {"$ref": "#/$defs/twins"}, "maxItems": 9}]}}},
    {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(300)]},
    {"type": "object", "properties": {f"p{n}": {"enum": [n, n + 1]} for n in range(2500)}},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "object", "required": ["missing"]},
    {"type": "object", "properties": [1]},
    {"type": "banana"},
    {"type": []},
    {"enum": []},
    {"anyOf": 5},
    {"not": {}},
    {"items": 7},
    5,
    "text",
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=lambda schema: str(schema)[:40])
def test_hostile_schemas_are_refused_at_once(model: Model, schema: Any) -> None:
    began = process_time()
    with pytest.raises(InvalidOption, match="schema"):
        model.grammar(json.dumps(schema))
    assert process_time() - began < 5.0


def test_alternatives_that_multiply_end_with_an_error(model: Model) -> None:
    """The reference to the root is no named reference, and still must not grow without end."""
    with pytest.raises(InvalidOption, match="schema"):
        model.grammar(json.dumps(TWINS))


@pytest.mark.parametrize("text", ["", "{", "[" * 20000, "{" * 50, "x" * (MAX_SCHEMA + 1), "NaN"])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="JSON schema"):
        to_gbnf(text)


def test_a_vocabulary_alone_does_for_a_grammar(model: Model, verifier_path: Path) -> None:
    """The device that asks over a mesh has no weights, and judges what a schema allows."""
    schema, nothing, ids = '{"type": "object"}', np.empty(0, np.int32), np.arange(model.n_vocab, dtype=np.int32)
    with Model.load(verifier_path, text_only=True) as text:
        allowed = text.grammar(schema).allowed(nothing, ids)
    assert np.array_equal(allowed, model.grammar(schema).allowed(nothing, ids))
    assert allowed.any()

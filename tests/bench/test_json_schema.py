"""The benchmark of JSON schemas: its schemas are sound, and it finds what is not valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest

from bench.robustness.json_schema import REFUSED, is_valid, measured, random_schema, table
from edgellm.engine import Model
from edgellm.errors import InvalidOption


@pytest.fixture(scope="module")
def text(verifier_path: Path) -> Iterator[Model]:
    with Model.load(verifier_path, text_only=True) as model:
        yield model


def test_random_schemas_are_schemas_that_a_grammar_keeps(text: Model) -> None:
    chance = random.Random(1)
    for _ in range(300):
        schema = random_schema(chance)
        jsonschema_rs.validator_for(schema)
        text.grammar(json.dumps(schema))


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_a_grammar_would_not_keep_is_refused(text: Model, keyword: str) -> None:
    jsonschema_rs.validator_for(REFUSED[keyword])
    with pytest.raises(InvalidOption, match=r"schema"):
        text.grammar(json.dumps(REFUSED[keyword]))


def test_what_is_not_valid_is_found() -> None:
    schema = {"type": "integer", "maximum": 5}
    assert [is_valid(schema, text) for text in ("5", "6", '"5"', "5]", "")] == [True, False, False, False, False]


def test_replies_are_valid_and_the_result_says_so() -> None:
    found = measured(3, 1.0, 0, 1)
    assert found["outcomes"] == {"valid": 3}
    assert all(found["refused"].values())
    assert found["share_of_same"] > 0.9
    assert "3 schemas at temperature 1: 3 valid" in table(found)

"""JSON that any reader takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.valid_json import read_json, write_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NaN", "NaN"), ("-Infinity", "-Infinity"), ("1e999", "1e999"), ("[-1e999]", ["-1e999"]), ("1e3", 1000.0),
        ("9" * 5000, "9" * 5000), ("1" * 400, "1" * 400),
        ("1" * 300, int("1" * 300)), ("-0", 0), ("5.0", 5.0), ('"a\nb"', "a\nb"),
    ],
)  # fmt: skip
def test_numbers_that_json_has_not_are_texts(text: str, value: object) -> None:
    assert read_json(text) == (value, len(text))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (r'"a\ud83d"', '"a\ufffd"'), (r'{"\ude00": 1}', '{"\ufffd": 1}'), (r'"\ude00\ud83d"', '"\ufffd\ufffd"'),
        (r'"\ud83d\ude00"', '"😀"'), (r'"\u0000"', r'"\u0000"'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_replaced(text: str, written: str) -> None:
    assert write_json(read_json(text)[0]) == written


@given(st.recursive(st.floats() | st.text(st.characters(codec=None)), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(st.characters(codec=None)), inner)))  # fmt: skip
def test_whatever_is_read_is_written_as_valid_json(value: Any) -> None:
    written = write_json(read_json(json.dumps(value))[0])
    written.encode()
    json.loads(written, parse_constant=pytest.fail)

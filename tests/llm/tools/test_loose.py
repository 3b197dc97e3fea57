"""Values without quotation marks, by their schema, and in Python's form."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.llm.tools.values import Schema, read_loose, typed

STRING, INTEGER, NUMBER, BOOLEAN, ARRAY, OBJECT, NULL = (
    {"type": kind} for kind in ("string", "integer", "number", "boolean", "array", "object", "null")
)
ROOT = {"$defs": {"S": STRING, "a/b": INTEGER, "S T": {"$ref": "#/$defs/S"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *((STRING, text, text) for text in ("12345", "true", "None", "[1]", '{"a": 1}', '"a"', " a ", "", "1.10")),
        ({"anyOf": [STRING, NULL]}, "12345", "12345"), ({"anyOf": [STRING, NULL]}, "True", "True"),
        ({"anyOf": [STRING, NULL]}, "null", None), ({"type": ["string", "null"]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None), ({"type": "STRING"}, "5", "5"),
        ({"oneOf": [STRING, ARRAY]}, "5", "5"), ({"oneOf": [STRING, ARRAY]}, "['a']", ["a"]),
        ({"anyOf": [STRING, INTEGER]}, "5", 5), ({"type": ["string", "integer"]}, "007", "007"),
        ({"allOf": [STRING, {"minLength": 1}]}, "5", "5"),
        ({"allOf": [{"anyOf": [STRING, INTEGER]}, STRING]}, "5", "5"),
        ({"$ref": "#/$defs/S"}, "7", "7"), ({"$ref": "#/$defs/a~1b"}, "7.0", 7), ({"$ref": "#/$defs/S%20T"}, "7", "7"),
        ({"$ref": "#/$defs/loop"}, "7", 7), ({"$ref": "#/$defs/none"}, "7", 7), ({"$ref": "elsewhere"}, "7", 7),
        ({"enum": ["10", "20"]}, "10", "10"), ({"enum": ["10", "20"]}, "30", "30"), ({"enum": [1, "1"]}, "1", 1),
        ({"enum": ["none", "all"]}, "none", "none"), ({"enum": ["10"]}, " 10\n", "10"), ({"enum": ["a"]}, '"a"', "a"),
        ({"const": "1"}, "1", "1"), ({"const": None}, "None", None), ({"enum": [True, "x"]}, "TRUE", True),
        (BOOLEAN, "True", True), (BOOLEAN, "FALSE", False), (BOOLEAN, " false ", False), (BOOLEAN, "maybe", "maybe"),
        (INTEGER, "5", 5), (INTEGER, "5.0", 5), (INTEGER, "1e3", 1000), (INTEGER, "5.5", 5.5), (INTEGER, "-0", 0),
        (INTEGER, "five", "five"), (NUMBER, "5.0", 5.0), (NUMBER, "5", 5),
        (NUMBER, "NaN", "NaN"), (NUMBER, "1e999", "1e999"),
        ({"anyOf": [INTEGER, NULL]}, "None", None), ({"anyOf": [INTEGER, NULL]}, "5.0", 5),
        (ARRAY, "[1]", [1]), (ARRAY, "['a', \"b\"]", ["a", "b"]),
        (ARRAY, "[True, None, 'it\\'s']", [True, None, "it's"]),
        (OBJECT, "{'a': True}", {"a": True}), (OBJECT, "{'a': {'b': [1.5, {}]}}", {"a": {"b": [1.5, {}]}}),
        (OBJECT, "{'a': 'b', }", {"a": "b"}), (OBJECT, "{'a': 1", "{'a': 1"), (ARRAY, "[see above]", "[see above]"),
        ({}, "True", True), ({}, "5", 5), ({}, "{color: red}", "{color: red}"), (True, "5", 5), (False, "5", 5),
        (None, "None", None), ({"type": 5, "enum": 5, "anyOf": 5, "allOf": {}}, "x", "x"),
        (ARRAY, "[" * 5000, "[" * 5000),
    ],
)  # fmt: skip
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, value: object) -> None:
    found = typed(text, Schema(schema, ROOT))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"['a\n\t\\b', '\u00fc\x41', '\d', '\ud83d\ude00', '\ud83d']", ["a\n\t\\b", "üA", r"\d", "😀", "\ufffd"]),
        ('["say \\"hi\\"", \'"\', "\'"]', ['say "hi"', '"', "'"]),
        (r"['\U0001F600', '\UFFFFFFFF']", ["😀", "\ufffd"]),
    ],
)  # fmt: skip
def test_texts_have_the_escapes_of_json_and_python(text: str, value: object) -> None:
    assert read_loose(text) == (value, len(text))


def test_a_schema_of_many_references_is_read_in_part() -> None:
    many = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 50} for i in range(50)}
    schema = Schema({"$ref": "#/$defs/0", "properties": {"a": STRING}}, {"$defs": many})
    assert typed("5", schema) == 5
    assert schema.names() == {"a"}
    assert typed("5", schema.property("a")) == "5"

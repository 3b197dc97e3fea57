"""Calls in JSON whose arguments are texts, Python's objects, or nothing at all."""

from __future__ import annotations

import json

import pytest

from edgellm.llm.tools.json_calls import bare, mistral, tagged


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"arguments": "{\\"a\\": \\"\\\\ud83d\\"}"', {"a": "\ufffd"}), ('"arguments": "Rome"', {"arguments": "Rome"}),
        ('"arguments": "{} and more"', {"arguments": "{} and more"}),
        ('"arguments": ""', {}), ('"arguments": null', {}),
        ('"parameters": {"a": NaN}', {"a": "NaN"}), ('"arguments": {"a": "x\ny"}', {"a": "x\ny"}), ('"a": 1', {}),
        ('"arguments": {"a": True, \'b\': None}', {"a": True, "b": None}),
    ],
)  # fmt: skip
def test_arguments_are_always_an_object(written: str, arguments: object) -> None:
    call = '{"name": "f", ' + written + "}"
    for parse, text in ((tagged, f"<tool_call>{call}</tool_call>"), (bare, call), (mistral, f"[TOOL_CALLS][{call}]")):
        calls, _ = parse(text, {"f": {}}, True)
        assert [json.loads(one.arguments) for one in calls] == [arguments]


@pytest.mark.parametrize("arguments", ["[1]", "5", '{"a": ' + "[" * 101 + "]" * 101 + "}", '{"a": ' + "[" * 5000, "{"])
def test_what_is_no_call_stays_as_it_is(arguments: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
    assert tagged(text, {}, True) == ([], text)


def test_python_forms_count_once_the_reply_has_ended() -> None:
    text = "<tool_call>{'name': 'f', 'arguments': {'a': True}}</tool_call>"
    assert tagged(text, {}, False) == ([], text)
    assert [one.arguments for one in tagged(text, {}, True)[0]] == ['{"a": true}']

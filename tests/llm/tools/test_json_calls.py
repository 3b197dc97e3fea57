"""Calls in JSON whose arguments are texts, Python's objects, or nothing at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgellm.llm.tools.json_calls import bare, gemma, mistral, tagged


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


S, N = {"type": "string"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("written", "properties", "values"),
    [
        ("max-results:5,a.b:1,a/b:2", {}, {"max-results": 5, "a.b": 1, "a/b": 2}),
        ("$select:~id~,@type:~t~,größe:1,2nd:3", {}, {"$select": "id", "@type": "t", "größe": 1, "2nd": 3}),
        ("to:{Basic LLM Chain:{main:[[{node:~X~}]]}}", {}, {"to": {"Basic LLM Chain": {"main": [[{"node": "X"}]]}}}),
        ("~a b~:1,\"c\":2,'d':3", {}, {"a b": 1, "c": 2, "d": 3}), ("a:b:1", {"a:b": N}, {"a:b": 1}),
        ("path=~x~,save_as='r, s.docx',n=2", {}, {"path": "x", "save_as": "r, s.docx", "n": 2}),
        ("city:Paris,days:2", {"city": S, "days": N}, {"city": "Paris", "days": 2}),
        ("city:Paris, France: north,days:2", {"city": S, "days": N}, {"city": "Paris, France: north", "days": 2}),
        ("a:True,b:None,c:FALSE,d:null", {}, {"a": True, "b": None, "c": False, "d": None}),
        ("a:{x: [1, 2]},b:[1],c:{y:1}", {"a": S, "b": S, "c": {}}, {"a": "{x: [1, 2]}", "b": "[1]", "c": {"y": 1}}),
        ("a:True,b:007,c:1.10", {"a": S, "b": S, "c": S}, {"a": "True", "b": "007", "c": "1.10"}),
        ("n:5.0,m:{n:5.0}", {"n": N, "m": {"properties": {"n": N}}}, {"n": 5, "m": {"n": 5}}),
        ("tags:[red, dark blue],o:{k:v w}", {}, {"tags": ["red", "dark blue"], "o": {"k": "v w"}}),
        ("ids:[1,2]", {"ids": {"items": S}}, {"ids": ["1", "2"]}),
        ("m:{k:1}", {"m": {"additionalProperties": S}}, {"m": {"k": "1"}}),
        ('"a": "b, c: d}", "e": [\'x\', "y"]', {}, {"a": "b, c: d}", "e": ["x", "y"]}),
        ('q:~say "hi", a:b {x}~', {}, {"q": 'say "hi", a:b {x}'}),
        ("q:~a}<tool_call|> b~,n:1", {}, {"q": "a}<tool_call|> b", "n": 1}),
        ("q:~the ~ mark~,n:1", {}, {"q": 'the <|"|> mark', "n": 1}), ("q:~~,r:~\n~", {}, {"q": "", "r": "\n"}),
        ("q:~a~n:1", {"q": S, "n": N}, {"q": "a", "n": 1}), (" n : 5 , q : ~ x ~,\n", {}, {"n": 5, "q": " x "}),
        ('q:"quoted" and more,r:it\'s,n:1', {"q": S, "r": S, "n": N}, {"q": '"quoted" and more', "r": "it's", "n": 1}),
        ("url:https://a.b/c?d=e,n:1", {"url": S, "n": N}, {"url": "https://a.b/c?d=e", "n": 1}),
        ("code:if (x) { y }", {"code": S}, {"code": "if (x) { y }"}),
        ("a:NaN,b:-1e999,c:,d:1e3", {}, {"a": "NaN", "b": "-1e999", "c": "", "d": 1000.0}), ("", {}, {}),
    ],
)  # fmt: skip
def test_arguments_are_read(written: str, properties: dict[str, Any], values: dict[str, Any]) -> None:
    tools = {"f": {"function": {"parameters": {"properties": properties}}}}
    call = "<|tool_call>call:f{" + written.replace("~", '<|"|>') + "}"
    for text, ended in ((f"{call}<tool_call|>" * 2, False), (f"{call}\n<tool_call|>\n{call}", True)):
        calls, rest = gemma(text, tools, ended)
        assert [json.dumps(json.loads(one.arguments)) for one in calls] == [json.dumps(values)] * 2
        assert not rest.strip()


def test_open_brackets_end_with_the_reply_or_the_call() -> None:
    text = '<|tool_call>call:f{a:{b:[<|"|>x<|"|>'
    for whole, ended in ((text, True), (f"{text}<tool_call|>", False)):
        assert [one.arguments for one in gemma(whole, {}, ended)[0]] == ['{"a": {"b": ["x"]}}']
    (call,), _ = gemma("<|tool_call>call:f{a:[{<tool_call|>:[", {}, False)
    assert call.arguments == '{"a": [{}]}'
    for cut in (text, text[:-5], text[:22], "<|tool_call>call:f", "<|tool_call>call:f{a:"):
        assert gemma(cut, {}, False) == ([], cut)

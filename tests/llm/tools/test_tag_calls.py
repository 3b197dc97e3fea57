"""Calls between tags and in JSON, with values of any form: tags in values, tags that miss, texts for objects."""

import json
from typing import Any

import pytest

from edgellm.llm.tools.markup import bare, gemma, mistral, pairs, tagged, xml
from edgellm.llm.tools.values import Schema, Tool, read_loose, typed

TEXT = {"type": "string"}
TOOLS: dict[str, Tool] = {
    "write": {"function": {"parameters": {"properties": {"path": TEXT, "content": TEXT, "mode": TEXT}}}},
    "strict": {"function": {"parameters": {"properties": {"path": TEXT, "content": TEXT},
                                           "required": ["path", "content"]}}},
    "clock": {},
}  # fmt: skip
XML = (
    "<tool_call>\n<function=write>\n<parameter=path>\na.md\n</parameter>\n"
    "<parameter=content>\n{}\n</parameter>\n</function>\n</tool_call>"
)
PAIRS = (
    "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.md</arg_value>\n"
    "<arg_key>content</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
)
EXAMPLE = XML.format("x").replace("content>", "mode>")


def read(parse: Any, text: str, *, ended: bool = True) -> tuple[list[Any], str]:
    calls, rest = parse(text, TOOLS, ended)
    return [(call.name, json.loads(call.arguments)) for call in calls], rest.strip()


VALUES = [
    "", "\n", "a\n", "a\n\n", " a ", "a </parameter> b", "a </function> b", "a </tool_call> b", "</parameter>",
    "a\n</parameter>", "</parameter>\n</function>\n</tool_call>", "a\n</parameter>\n</function>\n</tool_call>\nb",
    "<parameter=path>", "a <parameter=mode> b", "<parameter=mode>", "a </parameter> b <parameter=mode> c",
    "<function=write>", "a\n<tool_call>\n<function=write>\n<parameter=path>\nb", EXAMPLE,
    f"First:\n{EXAMPLE}\nThen:\n{EXAMPLE}\nDone.", "<parameter=mode>\nx\n</parameter>",
    "re = '<parameter=q>(.*?)</parameter>'", "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>",
    "<arg_value>x</arg_value>", "a </tool_call", "a </arg_value> b", "</arg_value>", "</arg_value>\n</tool_call>",
    "<arg_key>path</arg_key>", "<arg_value>", "a <tool_call> b", PAIRS.format("x"), f"{PAIRS.format('x')}\n" * 2,
    "<arg_key>mode</arg_key>\n<arg_value>x</arg_value>", "a</arg_value>\n</tool_call>\nb",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("parse", "form"), [(xml, XML), (pairs, PAIRS)], ids=["lines", "pairs"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_value_may_hold_any_tags(parse: Any, form: str, value: str, calls: int) -> None:
    found = read(parse, "\n".join([form.format(value)] * calls))
    assert found == ([("write", {"path": "a.md", "content": value})] * calls, "")


@pytest.mark.parametrize(
    "missing",
    [
        ("</parameter>\n",), ("md\n</parameter>\n", "md\n"), ("b\n</parameter>\n", "b\n"), ("\n</tool_call>",),
        ("</function>\n",), ("</function>\n</tool_call>",), ("\n</parameter>\n</function>\n</tool_call>",),
        ("</parameter>\n</function>\n",), ("<tool_call>\n",), ("<tool_call>\n", "", "\n</tool_call>"),
        ("\n</parameter>\n", "</parameter>"), ("=path>\n", "=path>"),
    ],
)  # fmt: skip
def test_a_missing_tag_of_lines_loses_nothing(missing: tuple[str, ...]) -> None:
    text = XML.format("b").replace(missing[0], missing[1] if len(missing) > 1 else "")
    text = text.replace(missing[2], "") if len(missing) > 2 else text
    assert read(xml, text) == ([("write", {"path": "a.md", "content": "b"})], "")
    if "\n</parameter>\n</function>" not in missing[0]:  # without any end, the next call is a part of the value
        assert read(xml, f"{text}\n{XML.format('c')}")[0][-1] == ("write", {"path": "a.md", "content": "c"})


@pytest.mark.parametrize("missing", ["</arg_value>", "\n</tool_call>", "</arg_value>\n</tool_call>"])
def test_a_missing_tag_of_pairs_loses_nothing(missing: str) -> None:
    text = PAIRS.format("b").replace(missing, "")
    assert read(pairs, text) == ([("write", {"path": "a.md", "content": "b"})], "")


@pytest.mark.parametrize("end", range(5, len(XML) - 15, 6))
def test_a_call_that_breaks_off_is_text_and_loses_no_other(end: int) -> None:
    text = XML.format("b </parameter> c")[:end]
    assert read(xml, text, ended=False) == ([], text.strip())
    calls, rest = read(xml, f"{XML.format('a')}\n{text}", ended=False)
    assert calls == [("write", {"path": "a.md", "content": "a"})]
    assert rest == text.strip()


def test_a_call_before_a_long_one_that_breaks_off_is_kept() -> None:
    text = XML.format("\n".join(f"<parameter={i}>" for i in range(60)))[:-60]
    calls, rest = read(xml, f"{XML.format('a')}\n{text}", ended=False)
    assert (calls, rest) == ([("write", {"path": "a.md", "content": "a"})], text)


def test_a_call_without_its_end_needs_what_its_function_requires() -> None:
    text = "<tool_call>\n<function=strict>\n<parameter=path>\na\n</parameter>\n"
    assert read(xml, text)[0] == []
    open_value = "b </parameter> c"
    assert read(xml, f"{text}<parameter=content>\n{open_value}")[0][0][1]["content"] == open_value
    assert read(xml, f"{text}<parameter=content>\nb")[0] == [("strict", {"path": "a", "content": "b"})]
    assert read(xml, "<tool_call>\n<function=clock>")[0] == [("clock", {})]


def test_text_around_calls_is_kept() -> None:
    found, rest = read(xml, f"{XML.format('b')}\nAnd now:\n{XML.format('c')}\nDone.")
    assert [values["content"] for _, values in found] == ["b", "c"]
    assert rest.split() == ["And", "now:", "Done."]


# --- calls in JSON ----------------------------------------------------------------------------------------------------


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


# --- values without quotation marks -----------------------------------------------------------------------------------


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

"""Calls of tools as each family of models writes them: with arguments and faults of any kind, in a text that arrives in
pieces of any length."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Message, ToolCall
from edgellm.engine.chat.template import plain_turns
from edgellm.llm.tools.markup import CLOSED
from edgellm.llm.tools.toolbox import Toolbox, find_format, split_calls
from edgellm.llm.tools.values import Tool
from edgellm.spec.types import Channel, Source, Token

Arguments: TypeAlias = Mapping[str, Any]
NAMES = ("path", "max-results", "a.b", "$select", "Basic LLM Chain", "größe")
STRING = {"type": "string"}


def python(value: object) -> str:
    """Return a value as Qwen's templates write it: objects and lists as JSON, all else in Python's form."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else str(value)


def xml(name: str, given: Arguments) -> str:
    values = "".join(f"<parameter={key}>\n{python(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def pairs(name: str, given: Arguments) -> str:
    written = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in given.items())
    values = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in written)
    return f"<tool_call>{name}{values}\n</tool_call>"


def as_json(before: str, after: str) -> Callable[[str, Arguments], str]:
    return lambda name, given: before % name + json.dumps(given) + after


# For each family: what shows it in a chat template, and how its template writes a call.
FAMILIES: dict[str, tuple[str, Callable[[str, Arguments], str]]] = {
    "hermes": ("<tool_call>", as_json('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>")),
    "qwen3-coder": ("<function= <parameter=", xml),
    "glm": ("<tool_call> <arg_key>", pairs),
    "llama": ('"parameters" ipython', as_json('{"name": "%s", "parameters": ', "}")),
    "mistral": ("[TOOL_CALLS]", as_json('[TOOL_CALLS][{"name": "%s", "arguments": ', "}]")),
    "mistral, 2025": ("[TOOL_CALLS] [ARGS]", as_json("[TOOL_CALLS]%s[ARGS]", "")),
    "gpt-oss": ("<|channel|> commentary", as_json("<|channel|>commentary to=functions.%s <|message|>", "<|call|>")),
    "deepseek": ("<｜tool▁calls▁begin｜>", as_json("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "")),
    "gemma": ("<|tool_call>", lambda name, given: f"<|tool_call>call:{name}{gemma(dict(given))}<tool_call|>"),
}  # fmt: skip

# Texts with tags of all families: such as close something that is not open, and whole calls as examples.
TAGS = (
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "<tool_call|>", "}", '"', "'", "\n", "\\n", "<|",
    "<tool_call>\n<function=f>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>", ", b:",
    "<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", "{'a': True}", "Zürich 😀",
)  # fmt: skip
texts = st.lists(st.sampled_from(TAGS) | st.text(max_size=5), max_size=4).map(lambda parts: "".join(parts))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def of_kind(kind: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    """Return schemas of a type in all their forms, with values: in the end they say the same."""
    forms = st.sampled_from([
        {"type": kind}, {"$ref": f"#/$defs/{kind}"}, {"allOf": [{"type": kind}]}, {"anyOf": [{"type": kind}]},
        {"oneOf": [{"$ref": f"#/$defs/{kind}"}]},
    ])  # fmt: skip
    return st.tuples(forms, values)


def nullable(schema: dict[str, Any], value: object) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    forms = [{"anyOf": [schema, {"type": "null"}]}, {"oneOf": [{"type": "null"}, schema]}]
    return st.tuples(st.sampled_from(forms), st.just(value) | st.none())


KINDS = {
    "string": texts, "integer": st.integers(), "boolean": st.booleans(),
    "number": st.floats(allow_nan=False, allow_infinity=False), "array": st.lists(plain, max_size=3),
    "object": st.dictionaries(st.sampled_from(NAMES), plain, max_size=3),
}  # fmt: skip
parameters = st.one_of([of_kind(kind, values) for kind, values in KINDS.items()])
parameters |= parameters.flatmap(lambda one: nullable(*one))
parameters |= st.sampled_from(["1", "true", "null", "[]", "a"]).map(lambda one: ({"enum": [one, "b"]}, one))
parameters |= st.sampled_from(["1", "None"]).map(lambda one: ({"const": one}, one))
functions = st.dictionaries(st.sampled_from(NAMES), parameters, max_size=4)


def tool(properties: Mapping[str, Any]) -> Tool:
    defs = {kind: {"type": kind} for kind in KINDS}
    return {"function": {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}}}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(function=functions, count=st.integers(1, 2))
def test_calls_that_a_template_writes_are_read_back(family: str, function: dict[str, Any], count: int) -> None:
    template, write = FAMILIES[family]
    style = find_format(template)
    assert style is not None
    arguments = {name: value for name, (_, value) in function.items()}
    written = write("f", arguments)
    text = written * (1 if family in ("llama", "mistral") else count)
    tools = {"f": tool({name: schema for name, (schema, _) in function.items()})}
    calls, rest = style.parse(text, tools, True)
    read = [json.loads(call.arguments) for call in calls]
    same = [json.dumps(one, sort_keys=True) for one in (arguments, *read)]  # JSON tells 1 from 1.0 and True.
    assert same == [same[0]] * (1 + len(text) // len(written))
    assert CLOSED.sub("", rest, count=1) == ""


PIECES = (
    *TAGS, "<tool_call>", "<function=f>", "<parameter=path>", "<parameter=q>", "<arg_key>", "</arg_key>", "<arg_value>",
    "<|tool_call>call:f{", '<|"|>', "path:", "a=", ",", "{", "[", "]", "NaN", "1e999", '"\\ud83d"', "[TOOL_CALLS]",
    '{"name": "f", "arguments": {', "f[ARGS]{", '"a": ', "-Infinity", "<|message|>", "to=functions.f", "9" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(
    arguments=st.dictionaries(st.sampled_from(NAMES), plain, max_size=3), cut=st.integers(0, 200),
    pieces=st.lists(st.sampled_from(PIECES) | texts, max_size=6), ended=st.booleans(),
)  # fmt: skip
def test_broken_calls_are_valid_json_or_text(
    family: str, arguments: dict[str, Any], cut: int, pieces: list[str], ended: bool
) -> None:
    template, write = FAMILIES[family]
    style = find_format(template)
    assert style is not None
    text = write("f", arguments)
    text = text[:cut] + "".join(pieces) + text[cut:]
    for tools in ({}, {"f": tool({"path": STRING, "a.b": {"type": "integer"}})}):
        for part in (text, text[: len(text) // 2], "".join(pieces)):
            calls, rest = style.parse(part, tools, ended)
            assert calls or rest == part
            for call in calls:
                (call.name + call.arguments).encode()
                assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)


# --- in a text that arrives bit by bit --------------------------------------------------------------------------------


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a place",
        "parameters": {"properties": {"city": {"type": "string", "description": "LONG"}, "days": {"type": "integer"}}},
    },
}  # fmt: skip
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "description": "The time"}}
CALLS = [("get_weather", {"city": "Zürich </tool_call> {x}", "days": 2}), ("clock", {})]
ONE = [("get_weather", {"city": "007", "days": 2})]

# For each family: what shows it in a chat template, a reply with calls, the calls, and the text before them.
REPLIES: dict[str, tuple[str, str, list[Any], str]] = {
    **{name: (FAMILIES[name][0], "Well:\n" + "\n".join(FAMILIES[name][1](*call) for call in CALLS), CALLS, "Well:\n")
       for name in ("hermes", "qwen3-coder", "glm", "deepseek", "gemma")},
    "llama": (FAMILIES["llama"][0], FAMILIES["llama"][1](*CALLS[0]), CALLS[:1], ""),
    "llama, several": (
        '"parameters" ipython',
        ('<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "007", "days": 2}}; '
        '{"name": "clock", "parameters": {}}'),
        [*ONE, ("clock", {})], "",
    ),
    "mistral": (
        "[TOOL_CALLS]",
        ('Yes.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "007", "days": 2}, "id": "123456789"},'
        ' {"name": "clock", "arguments": {}}]'),
        [*ONE, ("clock", {})], "Yes.",
    ),
    "mistral, 2025": (
        "[TOOL_CALLS] [ARGS]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "007", "days": 2}[TOOL_CALLS]clock[CALL_ID]1[ARGS]{}',
        [*ONE, ("clock", {})], "",
    ),
    "gpt-oss": (
        "<|channel|> commentary",
        ("<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "007", "days": 2}'),
        ONE, "<|channel|>analysis<|message|>I need the weather.<|end|>",
    ),
    "deepseek v3": (
        "<｜tool▁calls▁begin｜> ```json",
        ("Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "007", "days": 2}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        [*ONE, ("clock", {})], "Hm.",
    ),
}  # fmt: skip


def toolbox(template: str, choice: str | None = None) -> Toolbox:
    found = find_format(template)
    assert found is not None
    return Toolbox((WEATHER, CLOCK), found, False, () if choice is None else (choice,))


def read(text: str, box: Toolbox, lengths: list[int]) -> tuple[str, list[ToolCall]]:
    """Read `text` in tokens of these lengths, in turn; return what is left of it, and the calls."""
    pieces = list[bytes]()
    whole = re.compile(r"(<\|[a-z]+\|>)" if box.format.everywhere else "($^)")  # gpt-oss writes them as control tokens
    for number, part in enumerate(whole.split(text)):
        data = part.encode()
        while data:
            length = len(data) if number % 2 else lengths[len(pieces) % len(lengths)]
            pieces.append(data[:length])
            data = data[length:]

    def tokens() -> Iterator[Token]:
        for number, piece in enumerate(pieces):
            yield Token(number, piece, Source.VERIFIER)

    found = list(split_calls(tokens(), box, pieces.__getitem__))
    assert not box.format.whole or all(isinstance(one, Token) for one in found[: len(pieces)]), "calls come at the end"
    kept = b"".join(one.piece for one in found if isinstance(one, Token))
    return kept.decode(), [one for one in found if isinstance(one, ToolCall)]


def told(calls: list[ToolCall]) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", REPLIES)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_calls_are_found_however_the_text_is_cut(family: str, lengths: list[int]) -> None:
    template, text, calls, before = REPLIES[family]
    kept, found = read(text, toolbox(template), lengths)
    assert told(found) == calls
    assert kept == before
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize("family", REPLIES)
def test_other_text_stays_as_it_is_and_a_call_that_breaks_off_is_text(family: str) -> None:
    template, text, _, before = REPLIES[family]
    for other in ("Plain text, 1 < 2 and [so on].", "x <tool", "<|end", "{", "Zürich \u20ac{1}", "<|channel|>"):
        assert read(other, toolbox(template), [3]) == (other, [])
    kept, found = read(text[: text.index("get_weather") + 13], toolbox(template), [4])
    assert (found, kept[: len(before)]) == ([], before)


@pytest.mark.parametrize("family", REPLIES)
def test_a_forced_call_continues_its_opening(family: str) -> None:
    template = REPLIES[family][0]
    box = toolbox(template, "get_weather")
    rests = {"qwen3-coder": "<parameter=days>\n2\n</parameter>\n</function>", "gemma": "days:2}<tool_call|>",
             "glm": "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
             "hermes": '{"days": 2}}\n</tool_call>', "mistral": '{"days": 2}}]', "llama": '{"days": 2}}',
             "llama, several": '{"days": 2}}'}  # fmt: skip
    kept, found = read(rests.get(family, '{"days": 2}'), box, [2])
    assert told(found) == [("get_weather", {"days": 2})]
    assert kept == ""


def test_thoughts_are_not_looked_through() -> None:
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    tokens = [Token(0, text.encode(), Source.VERIFIER, channel=Channel.THINKING)]
    assert list(split_calls(tokens, toolbox("<tool_call>"), lambda _: b"")) == tokens


def test_a_template_without_tools_is_told_in_words() -> None:
    box = Toolbox((WEATHER,), toolbox("<tool_call>").format, True)
    call = ToolCall("clock", "{}", "call_1")
    turns = [Message("user", "When?"), Message("assistant", "", tool_calls=(call,)), Message("tool", "12:00"),
             Message("tool", "13:00"), Message("user", "Sure?")]  # fmt: skip
    told = box.messages(turns)
    assert [turn.role for turn in told] == ["system", "user", "assistant", "user", "user"]
    assert "get_weather" in told[0].content
    assert told[2].content == '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert told[3].content == "<tool_response>12:00</tool_response>\n<tool_response>13:00</tool_response>"
    assert box.arguments() == {}
    assert plain_turns(told) == told
    assert box.messages([Message("system", "Be brief."), *turns])[0].content.startswith("Be brief.\n\nYou can call")


@pytest.mark.parametrize("family", REPLIES)
def test_a_call_that_must_come_has_a_schema_where_it_is_json(family: str) -> None:
    box = toolbox(REPLIES[family][0], "get_weather")
    functions = [tool["function"] for tool in box.tools]
    schema = box.format.schema(functions)
    assert (box.format.schema(functions[:1]) is None) == (box.format.objects is None and not box.format.json_arguments)
    if box.format.objects is None:
        assert schema is None
        return
    described = json.loads(schema or "")
    assert [one["properties"]["name"]["const"] for one in described["anyOf"]] == ["get_weather", "clock"]
    assert box.format.arguments in described["anyOf"][0]["required"]
    assert "LONG" not in str(schema)  # a grammar has a limit, and no use for it
    call = json.dumps({"name": "clock", box.format.arguments: {}})
    assert told(read(call, replace(box, schema=schema), [2])[1]) == [("clock", {})]

"""Arguments of any kind, written as each family's template writes them, and replies with faults of any kind."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.llm.tools.markup import CLOSED
from edgellm.llm.tools.toolbox import find_format
from edgellm.llm.tools.values import Tool

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
    same = [json.dumps(one, sort_keys=True) for one in (arguments, *read)]  # which tells 1 from 1.0 and True
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

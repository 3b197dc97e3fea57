"""Calls of tools as each family of models writes them, in a text that arrives in pieces of any length."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Message, ToolCall
from edgellm.engine.chat.template import plain_turns
from edgellm.llm.tools.toolbox import Toolbox, find_format, split_calls
from edgellm.spec.types import Channel, Source, Token
from tests.llm.tools.test_formats import FAMILIES

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


def plain(calls: list[ToolCall]) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("family", REPLIES)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_calls_are_found_however_the_text_is_cut(family: str, lengths: list[int]) -> None:
    template, text, calls, before = REPLIES[family]
    kept, found = read(text, toolbox(template), lengths)
    assert plain(found) == calls
    assert kept == before
    assert len({call.id for call in found}) == len(found)


@pytest.mark.parametrize("family", REPLIES)
@pytest.mark.parametrize(
    "text", ["Plain text, 1 < 2 and [so on].", "x <tool", "<|end", "{", "Zürich \u20ac{1}", "<|channel|>"]
)
def test_other_text_stays_as_it_is(family: str, text: str) -> None:
    assert read(text, toolbox(REPLIES[family][0]), [3]) == (text, [])


@pytest.mark.parametrize("family", REPLIES)
def test_a_call_that_breaks_off_is_text(family: str) -> None:
    template, text, _, before = REPLIES[family]
    kept, found = read(text[: text.index("get_weather") + 13], toolbox(template), [4])
    assert found == []
    assert kept.startswith(before)


@pytest.mark.parametrize("family", REPLIES)
def test_a_forced_call_continues_its_opening(family: str) -> None:
    template = REPLIES[family][0]
    box = toolbox(template, "get_weather")
    rests = {"qwen3-coder": "<parameter=days>\n2\n</parameter>\n</function>", "gemma": "days:2}<tool_call|>",
             "glm": "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
             "hermes": '{"days": 2}}\n</tool_call>', "mistral": '{"days": 2}}]', "llama": '{"days": 2}}',
             "llama, several": '{"days": 2}}'}  # fmt: skip
    kept, found = read(rests.get(family, '{"days": 2}'), box, [2])
    assert plain(found) == [("get_weather", {"days": 2})]
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
    assert plain(read(call, replace(box, schema=schema), [2])[1]) == [("clock", {})]

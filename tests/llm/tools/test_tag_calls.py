"""Values between tags that hold such tags, and calls in which tags are missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgellm.llm.tools.tag_calls import pairs, xml
from edgellm.llm.tools.values import Tool

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


@pytest.mark.parametrize(
    "value",
    [
        "", "\n", "a\n\n", "a </parameter> b", "a </function> b", "a </tool_call> b", "</parameter>", "a\n</parameter>",
        "</parameter>\n</function>\n</tool_call>", "a\n</parameter>\n</function>\n</tool_call>\nb", "<parameter=path>",
        "a <parameter=mode> b", "<parameter=mode>", "a </parameter> b <parameter=mode> c", "<function=write>",
        "a\n<tool_call>\n<function=write>\n<parameter=path>\nb", EXAMPLE,
        f"First:\n{EXAMPLE}\nThen:\n{EXAMPLE}\nDone.", "<parameter=mode>\nx\n</parameter>",
        "re = '<parameter=q>(.*?)</parameter>'",
        "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>", "<arg_value>x</arg_value>", "a </tool_call",
    ],
)  # fmt: skip
@pytest.mark.parametrize("calls", [1, 2])
def test_a_value_of_lines_may_hold_any_tags(value: str, calls: int) -> None:
    found = read(xml, "\n".join([XML.format(value)] * calls))
    assert found == ([("write", {"path": "a.md", "content": value})] * calls, "")


@pytest.mark.parametrize(
    "value",
    [
        "", "\n", "a\n", " a ", "a </arg_value> b", "a </tool_call> b", "</arg_value>", "</arg_value>\n</tool_call>",
        "<arg_key>path</arg_key>", "<arg_value>", "a <tool_call> b", PAIRS.format("x"), f"{PAIRS.format('x')}\n" * 2,
        "<arg_key>mode</arg_key>\n<arg_value>x</arg_value>", "a</arg_value>\n</tool_call>\nb", "</parameter>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("calls", [1, 2])
def test_a_value_of_pairs_may_hold_any_tags(value: str, calls: int) -> None:
    found = read(pairs, "\n".join([PAIRS.format(value)] * calls))
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

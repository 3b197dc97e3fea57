"""A model's markup for thoughts is found from its template and its vocabulary, and arguments from the template."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.engine import Model
from edgellm.engine.chat.thinking import find_markup, fitting
from edgellm.isolation.template_sandbox import arguments
from testkit.chat_traits import PLAIN
from testkit.hostile.inputs import LONG_TO_COMPILE
from testkit.thinking_templates import ALWAYS, CHANNELS, FAMILIES, LITERAL, MARKERS, OPENED
from tests.engine.chat.test_forms import template_of

MARKUP = {
    "literal": ("<think>", "</think>"),
    "opened": ("<think>", "</think>"),
    "always": ("<think>", "</think>"),
    "channels": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "markers": ("<|channel>thought", "<channel|>"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_markup_is_that_of_the_template(name: str) -> None:
    found = find_markup(FAMILIES[name], lambda _: False)
    assert found is not None
    assert (found.opening, found.closing) == MARKUP[name]
    assert found.channels is (name == "channels")
    assert "chat template contains" in found.reason


def test_the_vocabulary_tells_where_the_template_does_not() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert find_markup(plain, lambda _: False) is None
    found = find_markup(plain, lambda text: text in ("[THINK]", "[/THINK]"))
    assert found is not None
    assert found.opening == "[THINK]"
    assert "vocabulary" in found.reason
    assert find_markup(plain, lambda text: text == "[THINK]") is None


def test_a_prompt_that_ends_with_the_opening_begins_a_thought() -> None:
    found = find_markup(OPENED, lambda _: False)
    assert found is not None
    assert found.is_opened_by("<|assistant|><think>\n")
    assert not found.is_opened_by("<|assistant|><think>\n\n</think>\n\n")
    assert not found.is_opened_by("<think>\n<|assistant|>")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (LITERAL, ["add_generation_prompt", "enable_thinking", "messages"]),
        (OPENED, ["add_generation_prompt", "enable_thinking", "messages"]),
        (ALWAYS, ["add_generation_prompt", "messages"]),
        (CHANNELS, ["add_generation_prompt", "messages", "raise_exception", "reasoning_effort"]),
        (MARKERS, ["add_generation_prompt", "bos_token", "enable_thinking", "messages"]),
        ("{% if not budget is defined %}{% set budget = -1 %}{% endif %}{{ budget }}", ["budget"]),
        ("{% set effort = effort | default('low') %}{{ effort }}", ["effort"]),
        ("{% set a = 1 %}{% for b, c in d %}{{ a + b + c + loop.index }}{% endfor %}", ["d"]),
        ("{% macro f(x, y=z) %}{{ x ~ y ~ caller() }}{% endmacro %}{{ f(range(3)) }}", ["z"]),
    ],
)
def test_arguments_are_variables_that_the_template_does_not_set(source: str, names: list[str]) -> None:
    assert arguments(source) == names


@pytest.mark.parametrize("name", LONG_TO_COMPILE)
def test_arguments_of_a_long_template_are_found_without_evaluating_it(name: str) -> None:
    try:
        assert len(arguments(LONG_TO_COMPILE[name])) < 10
    except RecursionError:
        pytest.fail("each node is to be looked at once, however deep")


TWO = "{{ raise_exception('') if reasoning_effort | default('high') not in ['none', 'high'] }}{{ messages[0].content }}"
NAMED = "{% if reasoning_effort == 'max' or reasoning_effort == \"minimal\" %}!{% endif %}{{ messages[0].content }}"
EFFORT = "reasoning_effort"


@pytest.mark.parametrize(
    ("source", "thinks", "level", "kept", "think", "left_out"),
    [
        (CHANNELS, True, "none", None, False, False),
        (CHANNELS, True, "minimal", "low", None, True),
        (CHANNELS, True, "medium", "medium", None, False),
        (CHANNELS, True, "xhigh", "high", None, True),
        (CHANNELS, True, "max", "high", None, True),
        (NAMED, True, "minimal", "minimal", None, False),
        (NAMED, True, "max", "max", None, False),
        (NAMED, True, "xhigh", "high", None, True),
        (TWO, True, "none", "none", None, False),
        (TWO, True, "low", "none", None, True),
        (TWO, True, "xhigh", "high", None, True),
        (TWO, True, "much", None, None, True),
        (CHANNELS, True, "much", "much", None, False),
        (LITERAL, True, "minimal", None, False, False),
        (LITERAL, True, "low", None, True, True),
        (MARKERS, True, "high", None, True, True),
        (ALWAYS, True, "none", None, False, False),
        (ALWAYS, True, "medium", None, True, True),
        (PLAIN, False, "none", None, False, False),
        (PLAIN, False, "high", None, None, True),
        (PLAIN, False, 5, None, None, True),
    ],
)  # fmt: skip
def test_the_nearest_level_of_effort_is_chosen(
    draft_model: Model, source: str, thinks: bool, level: Any, kept: str | None, think: bool | None, left_out: bool
) -> None:
    template = template_of(source, draft_model)
    found = fitting({EFFORT: level}, template, thinks)
    template.close()
    assert found == ({EFFORT: kept} if kept else {}, think, [EFFORT] if left_out else [])


@pytest.mark.parametrize(
    ("source", "thinks", "arguments", "kept", "think", "left_out"),
    [
        (LITERAL, True, {"enable_thinking": False}, {"enable_thinking": False}, None, []),
        (ALWAYS, True, {"enable_thinking": False}, {}, False, []),
        (CHANNELS, True, {"thinking": True}, {}, True, []),
        (PLAIN, False, {"enable_thinking": False}, {}, False, []),
        (PLAIN, False, {"enable_thinking": True}, {}, None, ["enable_thinking"]),
        (PLAIN, False, {"mood": "x", "messages": [], "tools": 5}, {}, None, ["mood", "messages", "tools"]),
        ("{{ raise_exception('') if mood }}{{ messages }}", False, {"mood": "x"}, {}, None, ["mood"]),
        ("{{ raise_exception('always') }}{{ mood }}", False, {"mood": "x"}, {"mood": "x"}, None, []),
    ],
)  # fmt: skip
def test_arguments_that_a_template_does_not_read_are_left_out(
    draft_model: Model, source: str, thinks: bool, arguments: dict[str, Any], kept: dict[str, Any], think: bool | None,
    left_out: list[str],
) -> None:  # fmt: skip
    template = template_of(source, draft_model)
    assert fitting(arguments, template, thinks) == (kept, think, left_out)
    template.close()

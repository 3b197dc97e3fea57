"""A model's markup for thoughts is found from its template and its vocabulary, and arguments from the template."""

from __future__ import annotations

import pytest

from edgellm.engine.chat.thinking import find_markup
from edgellm.isolation.template_sandbox import arguments
from testkit.hostile.inputs import LONG_TO_COMPILE
from testkit.thinking_templates import ALWAYS, CHANNELS, FAMILIES, LITERAL, MARKERS, OPENED

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

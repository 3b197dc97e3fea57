"""What clients ask of a model's thoughts, as each family of chat templates knows it."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.engine import Model
from edgellm.engine.chat.effort import fitting
from testkit.chat_traits import PLAIN
from testkit.thinking_templates import ALWAYS, CHANNELS, LITERAL, MARKERS
from tests.engine.chat.test_forms import template_of

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

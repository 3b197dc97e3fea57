"""Thoughts on the command line: switched, limited, and kept apart from the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.cli.options import ThinkOptions
from edgellm.errors import InvalidOption
from testkit.thinking_templates import ALWAYS, CHANNELS, OPENED, with_template
from tests.cli.conftest import Done

Edge = Callable[..., Done]
QUESTION = "Where is my mug?"


@pytest.fixture(scope="module")
def thinkers(verifier_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bundled verifier with templates that have thoughts, by name."""
    folder = tmp_path_factory.mktemp("thinkers")
    templates = {"always": ALWAYS, "opened": OPENED, "channels": CHANNELS}
    return {
        name: str(with_template(verifier_path, folder / f"{name}.gguf", source)) for name, source in templates.items()
    }


def alone(model: str) -> tuple[str, ...]:
    return ("--draft", "none", "--verifier", model, "--retrieval", "off", "--max-tokens", "6")


def test_what_the_options_mean() -> None:
    assert ThinkOptions().fields() == {"think": None, "template_args": {}}
    assert ThinkOptions("on", "low", ("a=true", "b=x=y", "c=", 'd="1"', "e=1")).fields() == {
        "think": True,
        "template_args": {"reasoning_effort": "low", "a": True, "b": "x=y", "c": "", "d": "1", "e": 1},
    }
    assert ThinkOptions("off").fields()["think"] is False
    assert ThinkOptions("0").fields()["think"] == 0
    for think in ("maybe", "-1", "1.5", "", "٣", "9" * 5000):
        with pytest.raises(InvalidOption, match="--think is"):
            ThinkOptions(think).fields()
    for argument in ("enable_thinking", "=1"):
        with pytest.raises(InvalidOption, match="NAME=VALUE"):
            ThinkOptions(template_arg=(argument,)).fields()


def test_the_answer_follows_a_limited_thought(edge: Edge, thinkers: dict[str, str]) -> None:
    done = edge("chat", *alone(thinkers["always"]), "--think", "5", QUESTION)
    assert done.code == 0
    assert "thought for" in done.err
    assert "5 of them thought" in done.err
    rows = edge("chat", *alone(thinkers["always"]), "--think", "5", "--json", QUESTION).lines
    by_channel = {
        channel: "".join(row["text"] for row in rows[:-1] if row["channel"] == channel)
        for channel in ("thinking", "answer")
    }
    assert done.out == by_channel["answer"] + "\n"
    assert rows[-1]["summary"]["thinking"] == by_channel["thinking"].rstrip() != ""
    assert 0 < sum(row["channel"] == "answer" for row in rows[:-1]) <= 6


def test_thoughts_are_switched_off(edge: Edge, thinkers: dict[str, str]) -> None:
    wanted = edge("chat", *alone(thinkers["opened"]), "--think", "off", QUESTION)
    assert "thought for" not in wanted.err
    given = edge("chat", *alone(thinkers["opened"]), "--template-arg", "enable_thinking=false", QUESTION)
    assert given.out == wanted.out
    forced = edge("chat", *alone(thinkers["always"]), "--think", "off", QUESTION)
    assert (forced.code, forced.err.count("thought")) == (0, 0)


def texts(lines: str) -> list[str]:
    return [json.loads(line).get("text", "") for line in lines.splitlines()]


def test_wrong_arguments_are_refused_with_those_that_are_right(edge: Edge, thinkers: dict[str, str]) -> None:
    done = edge("chat", *alone(thinkers["opened"]), "--template-arg", "thinking=false", QUESTION)
    assert done.code == 2
    assert "It reads enable_thinking" in done.err
    done = edge("chat", *alone(thinkers["opened"]), "--reasoning-effort", "low", QUESTION)
    assert "'reasoning_effort' is not an argument" in done.err
    assert edge("chat", *alone(thinkers["channels"]), "--reasoning-effort", "low", QUESTION).code == 0
    done = edge("chat", "--think", "on", QUESTION)
    assert done.code == 2
    assert "is not known to think" in done.err

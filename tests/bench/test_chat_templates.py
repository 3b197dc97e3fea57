"""The comparison of templates with plain Jinja tells what is the same, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine.chat_templates import CONVERSATIONS, compared, table
from testkit.thinking_templates import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_renders_as_plain_jinja_does(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.jinja"
    path.write_text(FAMILIES[name], encoding="utf-8")
    row = compared(path)
    assert row["outcomes"] == dict.fromkeys(CONVERSATIONS, "same")
    assert len(row["thinking"]) == 2


def test_refusals_and_differences_are_told(tmp_path: Path) -> None:
    source = (
        "{% if tools %}{{ messages.append({}) }}{% elif messages|length > 5 %}{{ raise_exception('no') }}"
        "{% elif messages|length == 4 %}{{ messages.__class__ }}{% endif %}{{ messages[0].content }}"
    )
    path = tmp_path / "odd.jinja"
    path.write_text(source, encoding="utf-8")
    row = compared(path)
    outcomes = {name: text.partition(":")[0] for name, text in row["outcomes"].items()}
    assert outcomes == dict.fromkeys(CONVERSATIONS, "same") | {
        "tools": "refused", "tool called": "refused", "many turns": "both refuse",
        "thinking on": "differs", "thinking off": "differs",
    }  # fmt: skip
    assert "append" in row["outcomes"]["tools"]
    assert "1 templates: " in table({"templates": [row]})

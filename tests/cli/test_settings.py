"""Options that a command writes into the settings file, beside what its user wrote."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from typer.main import get_command

from edgellm.cli.app import app
from edgellm.cli.commands.config import write_settings
from edgellm.errors import InvalidOption
from edgellm.system import config_file

PAIR = {"draft": "qwen3:0.6b", "verifier": "qwen3:4b"}


def written(text: str | None, tables: Mapping[str, Mapping[str, str]]) -> str:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        config_file().write_text(text, encoding="utf-8")
    root: Any = get_command(app).make_context("edgellm", ["config", "path"], resilient_parsing=True)
    write_settings(root, tables)
    return config_file().read_text(encoding="utf-8")


def test_a_new_file_has_the_tables() -> None:
    text = written(None, {"chat": PAIR, "serve": PAIR})
    assert tomllib.loads(text) == {"chat": PAIR, "serve": PAIR}
    assert text.startswith("[chat]\ndraft = ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# mine\n",
        "[chat]\n",
        "[chat]\nbudget = 0.2  # a fifth\n\n[serve]\nhttp-port = 8081\n",
        "[serve]\nhttp-port = 8081\n[chat]\nverifier = 'old'\n# the end",
        '  [ chat ]  # of mine\n  "verifier" = "old" # which I liked\n  draft="none"\n[mesh.plan]\ntokens-in = 9\n',
        '[chat]\nsystem = """\nthree\nlines"""\n',
        "[mesh.plan]\ntokens-in = 9\n",
    ],
)
def test_what_the_user_wrote_stays(text: str) -> None:
    before, after = tomllib.loads(text), written(text, {"chat": PAIR})
    assert tomllib.loads(after) == {**before, "chat": {**before.get("chat", {}), **PAIR}}
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    assert [line.strip() for line in after.splitlines() if line.strip().startswith("#")] == comments
    assert written(None, {"chat": PAIR}) == after


@pytest.mark.parametrize(
    "text",
    ['chat = { verifier = "old" }\n', 'chat.verifier = "old"\n', '[chat]\nsystem = """\ndraft = me\n"""\n'],
)
def test_a_form_that_only_its_user_can_change_is_left_as_it_is(text: str) -> None:
    with pytest.raises(InvalidOption, match="cannot change") as raised:
        written(text, {"chat": PAIR})
    assert "[chat] draft = 'qwen3:0.6b'; [chat] verifier = 'qwen3:4b'" in raised.value.next_step
    assert config_file().read_text(encoding="utf-8") == text


def test_a_file_with_an_error_is_not_written_to() -> None:
    with pytest.raises(InvalidOption, match="is not an option"):
        written('[chat]\nverifyer = "x"\n', {"chat": PAIR})

"""Settings: what the file says, what a variable says, what the command line says, and which of them counts."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm.system import config_file
from tests.cli.conftest import Done, commands

Edge = Callable[..., Done]


def write(text: str) -> Path:
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tokens(done: Done) -> int:
    assert done.code == 0, done.err
    return int(done.lines[-1]["summary"]["tokens"])


def test_the_command_line_comes_before_a_variable_and_that_before_the_file(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("chat", "--json", "Where is my mug?")
    write("[chat]\nmax-tokens = 3\n")
    assert tokens(edge(*words)) == 3
    monkeypatch.setenv("EDGELLM_CHAT_MAX_TOKENS", "2")
    assert tokens(edge(*words)) == 2
    assert tokens(edge(*words, "--max-tokens", "1")) == 1


def test_where_each_value_is_from_is_told(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('[chat]\nbudget = 0.2\ncontext = ["a.txt", "b.txt"]\n[mesh.plan]\ntokens_out = 7\n')
    monkeypatch.setenv("EDGELLM_SERVE_HTTP_PORT", "8081")
    monkeypatch.setenv("EDGELLM_VERIFIER", "none")
    plain = edge("config", "show")
    assert tomllib.loads(plain.out) == {
        "chat": {"budget": 0.2, "context": ["a.txt", "b.txt"], "verifier": "none"},
        "mesh": {"plan": {"tokens-out": 7}},
        "profile": {"verifier": "none"},  # that variable has always been for both
        "serve": {"http-port": "8081"},
    }
    told = edge("config", "show", "--origin").out
    assert f"budget = 0.2  # {path}" in told
    assert 'http-port = "8081"  # EDGELLM_SERVE_HTTP_PORT' in told
    assert 'verifier = "none"  # EDGELLM_VERIFIER' in told
    known = edge("config", "show", "chat", "--all", "--origin", "--json").answer["chat"]
    assert known["budget"] == {"value": 0.2, "origin": "file"}
    assert known["max-tokens"] == {"value": 512, "origin": "default"}
    assert known["gate"]["value"] == "auto"
    assert "serve" not in edge("config", "show", "chat", "--all", "--json").answer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[chat]\nbudgit = 1\n", "chat.budgit is not an option. Did you mean budget?"),
        ("[chatt]\nbudget = 1\n", "chatt is not a command. Did you mean [chat]?"),
        ("[mesh.plam]\nobjective = 'reply'\n", "mesh.plam is not a command. Did you mean [mesh.plan]?"),
        ("budget = 1\n", "budget is not an option. Choose one of [setup],"),
        ("install-completion = true\n", "install-completion is not an option"),
        ("[chat]\nbudget = [1, 2]\n", "chat.budget cannot be [1, 2]"),
        ("[chat]\nbudget = 2020-01-01\n", "chat.budget cannot be"),
        ("[serve]\nhttp-port = 'many'\n", 'serve.http-port cannot be "many": Input should be a valid integer'),
        ("[chat]\nversion = true\n", "chat.version is not an option"),
        ("[chat\n", "cannot be read as TOML"),
        ("\xff", "not an option"),
        ("a = " + "[" * 5000, "cannot be read as TOML"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_done(edge: Edge, text: str, says: str) -> None:
    if text == "\xff":
        write("").write_bytes(b"\xff\xfe")
        says = "cannot be read as TOML"
    else:
        write(text)
    done = edge("chat", "--json", "Where is my mug?")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert str(config_file()) in done.err
    assert done.err.count("\n") == 1
    assert edge("config", "path").code == 0
    assert edge("config", "show").code == 2


def test_a_variable_of_a_wrong_type_is_an_error_of_its_option(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_CHAT_MAX_TOKENS", "many")
    done = edge("chat", "Where is my mug?")
    assert done.code == 2
    assert "--max-tokens" in done.err
    assert "EDGELLM_CHAT_MAX_TOKENS" in done.err


def test_a_variable_separates_values_with_commas(edge: Edge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [tmp_path / "a note.txt", tmp_path / "another.txt"]
    for path in paths:
        path.write_text("The mug is in the kitchen.")
    monkeypatch.setenv("EDGELLM_CHAT_CONTEXT", f"{paths[0]}, {paths[1]}")
    assert edge("config", "show", "--json").answer == {"chat": {"context": [str(path) for path in paths]}}
    assert edge("chat", "Where is my mug?", "--max-tokens", "1").code == 0
    paths[1].unlink()
    assert "another.txt cannot be read" in edge("chat", "Where is my mug?").err


def test_every_option_has_a_variable_of_its_own() -> None:
    options: list[Any] = [option for one in commands() for option in one.command.params]
    variables = [one.envvar[-1] for one in options if one.param_type_name == "option" and not one.is_eager]
    assert len(variables) == len(set(variables))
    assert all(name.replace("_", "").isalnum() and name.isupper() for name in variables)
    assert {"EDGELLM_CHAT_BUDGET", "EDGELLM_MESH_PLAN_TOKENS_OUT", "EDGELLM_CHAT_JSON"} <= set(variables)

"""Options: what a setting says in a file, a variable or on the command line, hardware, and thoughts."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from edgellm.cli.app import app
from edgellm.cli.commands.config import write_settings
from edgellm.cli.options import DRAFT, VERIFIER, HardwareOptions, ThinkOptions
from edgellm.engine.hardware import ALL_LAYERS, Hardware
from edgellm.errors import InvalidOption
from edgellm.system import config_file
from tests.cli.conftest import Done, Edge

QUESTION = "Where is my mug?"


# --- settings -----------------------------------------------------------------------------------------------------


def settings_are(text: str | bytes) -> Path:
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def tokens(done: Done) -> int:
    return int(done.told().lines[-1]["summary"]["tokens"])


def test_the_command_line_precedes_a_variable_and_that_the_file(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("chat", "--json", QUESTION)
    settings_are("[chat]\nmax-tokens = 3\n")
    assert tokens(edge(*words)) == 3
    monkeypatch.setenv("EDGELLM_CHAT_MAX_TOKENS", "2")
    assert tokens(edge(*words)) == 2
    assert tokens(edge(*words, "--max-tokens", "1")) == 1
    monkeypatch.setenv("EDGELLM_CHAT_MAX_TOKENS", "many")
    edge(*words).told("--max-tokens", "EDGELLM_CHAT_MAX_TOKENS", code=2)


def test_where_each_value_is_from_is_told(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_are('[chat]\nbudget = 0.2\ncontext = ["a.txt", "b.txt"]\n[mesh.plan]\ntokens_out = 7\n')
    monkeypatch.setenv("EDGELLM_SERVE_HTTP_PORT", "8081")
    monkeypatch.setenv("EDGELLM_VERIFIER", "none")
    assert tomllib.loads(edge("config", "show").out) == {
        "chat": {"budget": 0.2, "context": ["a.txt", "b.txt"], "verifier": "none"},
        "mesh": {"plan": {"tokens-out": 7}},
        "profile": {"verifier": "none"},  # that variable is for both
        "serve": {"http-port": "8081"},
    }
    edge("config", "show", "--origin").told(
        f"budget = 0.2 # {path}", 'http-port = "8081" # EDGELLM_SERVE_HTTP_PORT', 'verifier = "none" # EDGELLM_VERIFIER'
    )
    known = edge("config", "show", "chat", "--all", "--origin", "--json").answer
    assert known["chat"]["budget"] == {"value": 0.2, "origin": "file"}
    assert known["chat"]["max-tokens"] == {"value": 512, "origin": "default"}
    assert "serve" not in known
    files = ["a note.txt", "another.txt"]
    monkeypatch.setenv("EDGELLM_CHAT_CONTEXT", ", ".join(files))
    assert edge("config", "show", "--json").answer["chat"]["context"] == files


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[chat]\nbudgit = 1\n", "chat.budgit is not an option. Did you mean budget?"),
        ("[chatt]\nbudget = 1\n", "chatt is not a command. Did you mean [chat]?"),
        ("[mesh.plam]\nobjective = 'reply'\n", "mesh.plam is not a command. Did you mean [mesh.plan]?"),
        ("budget = 1\n", "budget is not an option. Choose one of [setup],"),
        ("[chat]\nbudget = [1, 2]\n", "chat.budget cannot be [1, 2]"),
        ("[serve]\nhttp-port = 'many'\n", 'serve.http-port cannot be "many": Input should be a valid integer'),
        ("[chat]\nversion = true\n", "chat.version is not an option"),
        (b"\xff\xfe", "cannot be read as TOML"),
        ("a = " + "[" * 5000, "cannot be read as TOML"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_done(edge: Edge, text: str | bytes, says: str) -> None:
    path = settings_are(text)
    done = edge("chat", "--json", QUESTION).told(says, str(path), code=2)
    assert (done.out, done.err.count("\n")) == ("", 1)
    edge("config", "path").told()
    edge("config", "show").told(code=2)


PAIR = {"draft": "qwen3:0.6b", "verifier": "qwen3:4b"}


def written(text: str | None, tables: Mapping[str, Mapping[str, str]]) -> str:
    if text is not None:
        settings_are(text)
    root: Any = get_command(app).make_context("edgellm", ["config", "path"], resilient_parsing=True)
    write_settings(root, tables)
    return config_file().read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        None,
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
def test_what_the_user_wrote_stays(text: str | None) -> None:
    before, after = tomllib.loads(text or ""), written(text, {"chat": PAIR})
    assert tomllib.loads(after) == {**before, "chat": {**before.get("chat", {}), **PAIR}}
    comments = [line.strip() for line in (text or "").splitlines() if line.strip().startswith("#")]
    assert [line.strip() for line in after.splitlines() if line.strip().startswith("#")] == comments
    assert written(None, {"chat": PAIR}) == after


@pytest.mark.parametrize(
    "text", ['chat = { verifier = "old" }\n', 'chat.verifier = "old"\n', '[chat]\nsystem = """\ndraft = me\n"""\n']
)
def test_a_form_that_only_its_user_can_change_is_left_as_it_is(text: str) -> None:
    with pytest.raises(InvalidOption, match="cannot change") as raised:
        written(text, {"chat": PAIR})
    assert "[chat] draft = 'qwen3:0.6b'; [chat] verifier = 'qwen3:4b'" in raised.value.next_step
    assert config_file().read_text(encoding="utf-8") == text
    with pytest.raises(InvalidOption, match="is not an option"):
        written('[chat]\nverifyer = "x"\n', {"chat": PAIR})


# --- hardware -----------------------------------------------------------------------------------------------------


def test_a_value_holds_for_both_models_or_for_one() -> None:
    options = HardwareOptions(
        gpu_layers=("all", "draft=0"), threads=("4",), ctx_size=("draft=512", "8192"), cache_type=("verifier=q8_0",),
        device=("CUDA0/CUDA1",), tensor_split=("3/1",), flash_attn=("on",), mlock=("draft=on",), batch_size=("256",),
    )  # fmt: skip
    assert options.of(VERIFIER) == Hardware(
        ALL_LAYERS, ("CUDA0", "CUDA1"), (3.0, 1.0), 4, 8_192, 256, "q8_0", True, False
    )
    assert options.of(DRAFT) == Hardware(0, ("CUDA0", "CUDA1"), (3.0, 1.0), 4, 8_192, 256, None, True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu_layers", "many"), ("threads", "0"), ("threads", "x"), ("tensor_split", "a/b"), ("flash_attn", "maybe"),
     ("cache_type", "q2"), ("mlock", "yes"), ("ctx_size", "verifiers=5"), ("batch_size", "-1")],
)  # fmt: skip
def test_a_value_that_does_not_exist_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        HardwareOptions(**{name: (value,)}).of(VERIFIER)
    assert value.rpartition("=")[2].lstrip("-") in refused.value.what


def test_a_plan_has_the_options_that_it_depends_on_and_a_chat_uses_all(edge: Edge) -> None:
    for command in ("plan", "deploy"):
        shown = edge("mesh", command, "--help-all").told("--gpu-layers", "--tensor-split", "--ctx-size", "--cache-type")
        assert "--mlock" not in shown.out
    edge("chat", QUESTION, "--threads", "1", "--ctx-size", "256", "--max-tokens", "4").told()
    longer = f"{QUESTION} In the house of my grandmother, and where is the old key?"
    edge("chat", longer, "--ctx-size", "16").told("holds 16", code=1)
    edge("chat", QUESTION, "--ctx-size", "verifier=256", "--gpu-layers", "all").told("finds none", code=2)


def test_the_meaning_of_options_for_thoughts() -> None:
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

"""`edgellm chat` on the bundled pair: every way in, every flag, every way it can go wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.cli.app import run
from tests.cli.conftest import Done

Edge = Callable[..., Done]

SHORT = ("--max-tokens", "6")
LONG = ("--max-tokens", "60")
KEYS = {"id", "text", "source", "channel", "confidence", "importance", "exit_layer", "round"}
FIGURES = {
    "text", "prompt_tokens", "tokens", "ttft_ms", "tokens_per_second", "share_verified", "acceptance_rate",
    "mean_acceptance_length", "verifier_passes_per_token", "bytes_up", "bytes_down", "finish_reason",
}  # fmt: skip


def test_one_question_one_reply(edge: Edge) -> None:
    done = edge("chat", "Where is my mug?", *SHORT)
    assert done.code == 0
    assert "6 tokens" in done.err or "tokens/s" in done.err
    assert done.err.count("\n") == 1
    assert edge("chat", "Where is my mug?", *SHORT, "-q").err == ""


def test_json_has_one_object_a_token_and_then_the_summary(edge: Edge) -> None:
    done = edge("chat", "--json", "Where is my mug?", *SHORT)
    *rows, last = done.lines
    assert all(set(row) == KEYS for row in rows)
    assert set(last) == {"summary"}
    summary = last["summary"]
    assert set(summary) >= FIGURES
    assert summary["tokens"] == len(rows)
    assert summary["text"] == "".join(row["text"] for row in rows)
    assert edge("chat", "Where is my mug?", *SHORT).out.removesuffix("\n") == summary["text"]


def test_piped_text_beside_a_question_is_context(edge: Edge, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The mug is on the shelf.\n")
    piped = edge("chat", "--json", *SHORT, "Where?", stdin=notes.read_bytes()).lines[-1]["summary"]
    named = edge("chat", "--json", *SHORT, "Where?", "--context", str(notes)).lines[-1]["summary"]
    bare = edge("chat", "--json", *SHORT, "Where?").lines[-1]["summary"]
    assert piped["prompt_tokens"] == named["prompt_tokens"] > bare["prompt_tokens"]
    assert piped["text"] == named["text"]


@pytest.mark.parametrize(
    ("flags", "sources"),
    [
        (("--draft", "none", "--retrieval", "off"), {"verifier"}),
        (("--verifier", "none", "--retrieval", "off"), {"draft"}),
        (("--draft", "none"), {"verifier", "retrieved", "corrected", "bonus"}),
        (("--verifier", "none"), {"verifier", "retrieved", "corrected", "bonus"}),
        (("--gate", "never"), {"draft"}),
        (
            ("--gate", "always"),
            {"accepted", "corrected", "bonus", "retrieved", "verifier"},
        ),  # where drafting costs more
        (("-m", "edgellm-verifier", "--verifier", "none", "--retrieval", "off"), {"draft"}),
    ],
)
def test_baselines_are_one_flag(edge: Edge, flags: tuple[str, ...], sources: set[str]) -> None:
    done = edge("chat", "--json", "Hello", *SHORT, *flags)
    assert done.code == 0
    assert {row["source"] for row in done.lines[:-1]} <= sources


def test_gates_complete_in_the_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_EDGELLM_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "edgellm chat --gate s")
    run(())
    shown = capsys.readouterr().out
    assert "synera" in shown
    assert "confidence, then importance" in shown
    assert "random" not in shown


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("-m", "none.gguf"), 1, "There is no file none.gguf"),
        (("-m", "ann/none:Q8_0"), 1, "edgellm pull ann/none:Q8_0"),
        (("-m", "edgellm-drafd"), 1, "Did you mean edgellm-draft?"),
        (("-m", "../a/b"), 1, "There is no file"),
        (("-m", "a/b/c"), 2, "is not a model name"),
        (("--verifier", "127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("--verifier", "10.1.2.3:50151"), 1, "air the devices first"),
        (("--draft", "none", "--verifier", "none"), 2, "at least one"),
        (("--max-tokens", "0"), 2, "max_tokens is 0"),
        (("--temperature", "-1"), 2, "temperature is -1"),
        (("--gate", "maybe"), 2, "'auto', 'synera', 'confidence'"),
        (("--gate", "random"), 2, "needs a budget"),
        (("--retrieval", "context,dreams"), 2, "'dreams'"),
        (("--budget", "0.5", "--gate", "always"), 2, "does not keep a budget"),
        (("--early-exit", "maybe"), 2, "'auto', 'on', 'off'"),
        (("--profile", "none.json"), 1, "edgellm profile"),
        (("--max-tokens", "many"), 2, "--max-tokens"),
        (("--context", "none.txt"), 2, "none.txt cannot be read"),
        (("--context", "."), 2, "cannot be read"),
        (("--frobnicate",), 2, "--frobnicate"),
    ],
)
def test_what_cannot_work_is_one_line_with_a_next_step(
    edge: Edge, cache: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = edge("chat", "Hello", *words)
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says in done.err


def test_more_context_than_a_model_was_trained_for_is_told(edge: Edge) -> None:
    mesh = ("mesh", "run", "edgellm-verifier", "Where?", "--split", "here:1-12")
    for words in (("chat", "Where?"), ("serve", "--no-http", "--role", "verifier", "--port", "0"), mesh):
        done = edge(*words, "--ctx-size", "999999")
        assert done.code == 2
        assert re.search(r"verifier\.gguf was trained for 1024\. Give a --ctx-size .*1024", done.err)


def test_a_file_that_is_longer_than_the_context_is_told_with_both_numbers_and_what_would_help(
    edge: Edge, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("Where is the mug? " * 4_000, encoding="utf-8")
    (tmp_path / "short.txt").write_text("The mug is red.", encoding="utf-8")
    words = ("chat", "Where?", "--context", str(tmp_path / "short.txt"), "--context", str(tmp_path / "notes.txt"))
    done = edge(*words, "--ctx-size", "512")
    assert done.code == 1
    found = re.search(
        r"notes.txt has (\d+) tokens, (\d+) with the rest of the prompt, and the context holds 512", done.err
    )
    assert found is not None
    assert 15_000 < int(found[1]) < int(found[2])
    assert "was trained for" in done.err
    (tmp_path / "notes.txt").write_text("Where is the mug? " * 110, encoding="utf-8")
    advised = re.search(
        r"Give --ctx-size (\d+): its keys and values take up to", edge(*words, *SHORT, "--ctx-size", "512").err
    )
    assert advised is not None
    assert edge(*words, *SHORT, "--ctx-size", advised[1]).code == 0


def test_input_that_is_not_text(edge: Edge, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"caf\xe9")
    for done in (
        edge("chat", "Hello", "--context", str(tmp_path / "notes.txt")),
        edge("chat", "Hello", stdin=b"caf\xe9"),
        edge("chat", stdin=b"caf\xe9"),
    ):
        assert done.code == 1
        assert "is not UTF-8 text: byte 3 is 0xe9" in done.err


@pytest.mark.usefixtures("rows_are_cheap")
def test_history_that_is_off_is_neither_read_nor_written(edge: Edge) -> None:
    words = ("chat", "--json", "--draft", "none", "Where is my mug?", *LONG)
    first = edge(*words).lines[-1]["summary"]
    edge("history", "off")
    again = edge(*words).lines[-1]["summary"]
    assert again["retrieved"] == first["retrieved"]
    assert edge("history", "--json").answer["conversations"] == 1


def test_a_history_that_cannot_be_used_is_told_and_does_no_harm(edge: Edge, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    (folder / "history").write_text("a file in the way")
    done = edge("chat", "--draft", "none", "Hello", *SHORT)
    assert done.code == 0
    assert "Past conversations are not used" in done.err

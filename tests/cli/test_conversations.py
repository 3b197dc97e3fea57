"""A conversation is taken up again, listed, shown and removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.storage.chat_log import Conversations
from edgellm.storage.saved_prompts import prompts_folder
from tests.cli.conftest import Done

Edge = Callable[..., Done]
SHORT = ("--max-tokens", "6", "--draft", "none")


def said(edge: Edge) -> list[tuple[str, str]]:
    return list(Conversations().latest().turns)


def test_the_last_one_goes_on_with_all_that_was_said(edge: Edge) -> None:
    edge("chat", "The mug is in the shed. Where is the mug?", *SHORT)
    first = said(edge)
    done = edge("chat", "-c", "--json", "And where is my mug?", *SHORT)
    assert done.code == 0
    turns = said(edge)
    assert turns[:2] == first
    assert turns[2] == ("user", "And where is my mug?")
    assert len(turns) == 4
    listed = edge("conversations", "--json").answer
    assert [(row["turns"], row["title"]) for row in listed] == [(4, "The mug is in the shed. Where is the mug?")]
    alone = edge("chat", "--json", "And where is my mug?", *SHORT)
    assert alone.lines[-1]["summary"]["prompt_tokens"] < done.lines[-1]["summary"]["prompt_tokens"]
    assert len(edge("conversations", "--json").answer) == 2
    edge("chat", "--conversation", listed[0]["id"][:6], "Hello", *SHORT)
    assert len(said(edge)) == 6


@pytest.mark.parametrize("words", [("--no-history",), ()])
def test_with_the_history_off_nothing_is_kept(edge: Edge, words: tuple[str, ...]) -> None:
    if not words:
        edge("history", "off")
    assert edge("chat", "Hello", *SHORT, *words).code == 0
    assert edge("conversations", "--json").answer == []
    done = edge("chat", "-c", "Hello", *SHORT)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no conversation to continue" in done.err


def test_they_are_shown_and_removed(edge: Edge) -> None:
    for question in ("One?", "Two?", "Three?"):
        edge("chat", question, *SHORT)
    rows = edge("conversations", "--json").answer
    assert [row["title"] for row in rows] == ["Three?", "Two?", "One?"]
    assert "Two?" in edge("conversations").out
    shown = edge("conversations", "show", rows[0]["id"]).out
    assert shown.startswith("user: Three?\n\nassistant: ")
    assert edge("conversations", "show", rows[0]["id"], "--json").answer["turns"][0]["content"] == "Three?"
    assert edge("conversations", "rm", rows[0]["id"]).code == 2  # nobody is there to be asked
    assert edge("conversations", "rm", rows[0]["id"], "--yes", "--json").answer == {"removed": [rows[0]["id"]]}
    assert len(edge("conversations", "--json").answer) == 2
    assert "2 conversations" in edge("conversations", "rm", "--all", "-y").err
    assert "There are no conversations" in edge("conversations").err


def test_what_was_read_is_kept_for_the_next_process_until_a_conversation_is_removed(edge: Edge, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(" ".join(f"The box {number} is in the room {number % 7}." for number in range(40)))
    asked = ("chat", "Where is the box 12?", "--context", str(notes), *SHORT)
    for words in (("--no-history",), ("--prompt-cache", "0")):
        assert edge(*asked, *words).code == 0
    assert not prompts_folder().exists()
    edge(*asked)
    (kept,) = prompts_folder().iterdir()
    edge("chat", "-c", "And the box 13?", *SHORT)
    assert kept.exists()  # little was added
    edge("conversations", "rm", Conversations().latest().id, "--yes")
    assert not list(prompts_folder().iterdir())


@pytest.mark.parametrize(
    "words",
    [("show",), ("rm",), ("show", "--all"), ("list", "abc"), ("show", "zz"), ("rm", "zz", "-y"), ("rm", "", "-y")],
)
def test_what_cannot_be_meant_is_told(edge: Edge, words: tuple[str, ...]) -> None:
    edge("chat", "Hello", *SHORT)
    done = edge("conversations", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert len(edge("conversations", "--json").answer) == 1

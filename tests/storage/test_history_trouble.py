"""Past conversations outlive a crash, a full disk and each other's writers."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import HistoryUnusable
from edgellm.storage import History, chat_log, state
from tests.storage.chats import change, raw, said

ROOT = Path(__file__).parents[2]
DAMAGES: dict[str, str | Callable[[bytes], bytes]] = {
    "noise": lambda data: b"\x93\xf1 no database" * 400,
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "a page of zeros": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "other columns": "DROP TABLE entry; CREATE TABLE entry (kind)",
    # Python fails on SQLite's message about it.
    "a schema that is no text": (
        "PRAGMA writable_schema = ON;"
        " UPDATE sqlite_master SET sql = CAST(x'435245415445209CD4' AS TEXT) WHERE name = 'entry'"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("use", ["add", "recent"])
def test_a_damaged_database_is_set_aside_with_a_notice(
    history: History, damage: str | Callable[[bytes], bytes], use: str
) -> None:
    history.add("before", "r")
    if isinstance(damage, str):
        with closing(raw(history)) as db:
            db.executescript(damage)
    else:
        history.path.write_bytes(damage(history.path.read_bytes()))
    before = history.path.read_bytes()
    with pytest.raises(HistoryUnusable, match=r"is damaged, and was renamed to chats\.sqlite3\.aside\. A new one"):
        history.add("lost", "r") if use == "add" else history.recent()
    aside = history.path.with_name("chats.sqlite3.aside")
    assert history.recent() == []
    history.add("after", "r")
    assert said(history) == [("after", "r")]
    assert aside.read_bytes() == before
    assert history.facts().size >= len(before)
    history.clear()
    assert not aside.exists()


def test_a_row_that_is_far_too_large_is_damage(history: History) -> None:
    history.add("before", "r")
    change(history, "UPDATE entry SET reply = hex(zeroblob(4000000))")
    with pytest.raises(HistoryUnusable, match="is damaged"):
        history.recent()


def test_a_newer_version_is_left_alone(history: History) -> None:
    history.add("before", "r")
    change(history, "PRAGMA user_version = 2")
    before = history.path.read_bytes()
    for use in (history.recent, lambda: history.add("q", "r")):
        with pytest.raises(HistoryUnusable, match="has version 2, but this edgellm reads version 1"):
            use()
    assert history.path.read_bytes() == before


@pytest.mark.parametrize("change_row", ["at = 'x'", "question = x'ff'", "reply = x''"])
def test_a_damaged_row_is_passed_over(history: History, monkeypatch: pytest.MonkeyPatch, change_row: str) -> None:
    for question in ("before", "damaged", "after"):
        history.add(question, "r")
    change(history, f"UPDATE entry SET {change_row} WHERE id = 2")
    assert [past.question for past in history.recent()] == ["before", "after"]
    assert history.facts().conversations in (2, 3)
    monkeypatch.setattr(chat_log, "MAX_BYTES", 280)
    history.add("new", "r")
    assert said(history) == [("after", "r"), ("new", "r")]


def test_bytes_that_are_no_characters_do_not_come_out_of_it(history: History) -> None:
    history.add("q", "r")
    change(history, "UPDATE entry SET question = CAST(? AS TEXT)", b"a\xed\xa0\x80\xffb")
    assert said(history) == [("a\ufffd\ufffd\ufffd\ufffdb", "r")]


def test_processes_that_add_read_and_remove_do_not_disturb_each_other(history: History) -> None:
    program = (
        "import sys; from pathlib import Path; from edgellm.storage.chat_log import *\n"
        "folder, name = Path(sys.argv[1]), sys.argv[2]\n"
        "replies, typed, talks = History(folder), History(folder, 'typed'), Conversations(folder)\n"
        "for number in range(20):\n"
        "    replies.add(f'{name} {number}', 'r' * 3000); typed.add(f'{name} {number}', '')\n"
        "    talks.save(talk := Conversation.new().with_turns([('user', f'{name} {number}')]))\n"
        "    assert f'{name} {number}' in [past.question for past in replies.recent()]\n"
        "    if number % 2: talks.remove(talk)\n"
        "    assert number % 2 == 0 or talk not in talks.all()\n"
    )
    users = [subprocess.Popen([sys.executable, "-c", program, str(history.folder), name], cwd=ROOT) for name in "abc"]
    assert [user.wait() for user in users] == [0, 0, 0]
    for log in (history, History(history.folder, "typed")):
        found = [past.question for past in log.recent()]
        for name in "abc":
            assert [one for one in found if one[0] == name] == [f"{name} {number}" for number in range(20)]
    titles = sorted(one.title for one in chat_log.Conversations(history.folder).all())
    assert titles == sorted(f"{name} {number}" for name in "abc" for number in range(0, 20, 2))
    with closing(raw(history)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_while_another_process_writes_nobody_else_does(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.add("q", "r")
    monkeypatch.setattr(state, "LOCK_SECONDS", 0)
    with closing(raw(history)) as db:
        db.execute("BEGIN IMMEDIATE")
        for use in (lambda: history.add("q", "r"), history.expire):
            with pytest.raises(HistoryUnusable, match="in use by another process"):
                use()
        assert len(history.recent()) == 1  # reading needs no turn
    history.add("q", "r")
    assert len(history.recent()) == 2


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk without room for another page."""
    connect = sqlite3.connect

    def full(*args: Any, **more: Any) -> sqlite3.Connection:
        db = connect(*args, **more)
        db.execute("PRAGMA max_page_count = 1")  # as few as there are
        return db

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        yield


def test_a_full_disk_is_told_and_leaves_what_was_there(history: History, request: pytest.FixtureRequest) -> None:
    history.add("before", "r")
    before = history.path.read_bytes()
    request.getfixturevalue("full")
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        history.add("lost", "r" * 10_000)
    assert history.path.read_bytes() == before
    assert said(history) == [("before", "r")]

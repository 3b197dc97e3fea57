"""Past conversations: kept, bounded, the user's alone, and forgotten when asked; also after a crash."""

import errno
import os
import random
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm import state
from edgellm.errors import HistoryUnusable, InvalidOption
from edgellm.storage import History, chat_log, database
from edgellm.storage.chat_log import Conversation
from tests.storage.chats import change, keep, raw

TEXTS = st.text() | st.text(st.sampled_from('a\ud800\udfff\0\n\r\u2028"\\'))


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=4))
@settings(max_examples=60)
def test_every_text_comes_back(texts: list[tuple[str, str]]) -> None:
    """Whole, but for lone surrogates, which no UTF-8 can hold."""

    def whole(text: str) -> str:
        return "".join("?" if 0xD800 <= ord(character) < 0xE000 else character for character in text)

    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history")
        for question, reply in texts:
            keep(history, question, reply)
        kept = [tuple(text for _, text in one.turns) for one in reversed(history.all())]
        assert kept == [(whole(question), whole(reply)) for question, reply in texts]


def test_the_limit_counts_bytes_and_keeps_the_newest(history: History) -> None:
    history.save(begun("Ein Glas\n\none", "r", "two", "r"))
    keep(history, "ü")
    assert history.recent(4 + 4 + 3) == [("one", "r"), ("two", "r"), ("ü", "r")]
    assert history.recent(4 + 4 + 2) == [("two", "r"), ("ü", "r")]
    assert history.recent(2) == []


def test_off_keeps_what_is_there_and_neither_adds_nor_reads(history: History) -> None:
    assert history.on
    keep(history, "before")
    history.turn_off()
    history.turn_off()
    other = History(history.folder)
    assert not other.on
    keep(other, "meanwhile")
    assert other.recent() == []
    assert len(other.all()) == 1
    other.turn_on()
    other.turn_on()
    assert history.on
    keep(history, "after")
    assert [question for question, _ in history.recent()] == ["before", "after"]
    history.turn_off()
    history.path.unlink()
    history.path.mkdir()  # nobody is bothered with what is wrong where it is off
    keep(history, "q")
    assert history.recent() == []


def test_turned_off_while_waiting_is_off(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(history, "before")
    asked = threading.Event()
    opened = database.PrivateDatabase.writing

    def writing(*args: Any, **more: Any) -> AbstractContextManager[sqlite3.Connection]:
        asked.set()
        return opened(*args, **more)

    monkeypatch.setattr(database.PrivateDatabase, "writing", writing)
    with closing(raw(history)) as db:
        db.execute("BEGIN IMMEDIATE")
        adding = threading.Thread(target=keep, args=(history, "meanwhile"))
        adding.start()
        assert asked.wait(60)
        history.turn_off()
        db.execute("COMMIT")
    adding.join()
    history.turn_on()
    assert history.recent() == [("before", "r")]


def test_clear_removes_everything_from_the_disk(history: History) -> None:
    history.clear()
    assert not history.folder.parent.exists()
    keep(history, "a secret")
    history.path.with_name(f"{history.path.name}.aside").write_text("a damaged secret")
    history.turn_off()
    history.clear()
    assert [path.name for path in history.folder.iterdir()] == ["off"]
    history.turn_on()
    assert history.recent() == []


EVERY_USE: list[Callable[[History], object]] = [
    lambda history: keep(history, "q"),
    lambda history: history.recent(),
    lambda history: history.turn_off(),
]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def test_only_the_user_can_read_it(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # not at some later moment, but from the first
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with umask(0):
        keep(history, "q")
        history.turn_off()
    assert mode(history.folder) == 0o700
    assert {mode(path) for path in history.folder.iterdir()} == {0o600}
    assert len(list(history.folder.iterdir())) == 2  # chats, off


@pytest.mark.parametrize("use", EVERY_USE[:2])
def test_what_became_open_to_others_is_closed_again(history: History, use: Callable[[History], object]) -> None:
    keep(history, "q")
    history.path.chmod(0o644)
    history.folder.chmod(0o755)
    use(history)
    assert (mode(history.folder), mode(history.path)) == (0o700, 0o600)


@pytest.mark.parametrize("use", EVERY_USE[:2])
@pytest.mark.parametrize("name", ["chats.sqlite3", "chats.sqlite3-journal", "a pipe"])
def test_a_link_or_pipe_in_a_files_place_is_refused_and_not_waited_for(
    history: History, tmp_path: Path, use: Callable[[History], object], name: str
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    history.folder.mkdir(parents=True)
    if name == "a pipe":
        os.mkfifo(history.path)
    else:
        (history.folder / "chats.sqlite3").touch(0o600)
        (history.folder / name).unlink(missing_ok=True)
        (history.folder / name).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(HistoryUnusable, match="is not a plain file"):
        use(history)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("use", EVERY_USE)
def test_a_file_in_the_folders_place_is_told_and_stays(history: History, use: Callable[[History], object]) -> None:
    history.folder.parent.mkdir()
    history.folder.write_text("mine")
    history.folder.chmod(0o644)
    with pytest.raises(HistoryUnusable, match="not a folder"):
        use(history)
    assert (history.folder.read_text(), mode(history.folder)) == ("mine", 0o644)


@pytest.mark.parametrize("use", EVERY_USE)
def test_what_the_system_forbids_is_told(
    history: History, use: Callable[[History], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    keep(history, "q")
    monkeypatch.setattr(os, "open", forbidden)
    monkeypatch.setattr(sqlite3, "connect", forbidden)
    with pytest.raises(HistoryUnusable, match=r"cannot be .*: Permission denied\. Check its permissions"):
        use(history)


ROOT = Path(__file__).parents[2]
DAMAGES: dict[str, str | Callable[[bytes], bytes]] = {
    "noise": lambda data: b"\x93\xf1 no database" * 400,
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "a page of zeros": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "other columns": "DROP TABLE conversation; CREATE TABLE conversation (kind)",
    # Python fails on SQLite's message about it.
    "a schema that is no text": (
        "PRAGMA writable_schema = ON;"
        " UPDATE sqlite_master SET sql = CAST(x'435245415445209CD4' AS TEXT) WHERE name = 'conversation'"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("use", ["save", "recent"])
def test_a_damaged_database_is_set_aside_with_a_notice(
    history: History, damage: str | Callable[[bytes], bytes], use: str
) -> None:
    keep(history, "before")
    if isinstance(damage, str):
        with closing(raw(history)) as db:
            db.executescript(damage)
    else:
        history.path.write_bytes(damage(history.path.read_bytes()))
    before = history.path.read_bytes()
    with pytest.raises(HistoryUnusable, match=r"is damaged, and was renamed to chats\.sqlite3\.aside\. A new one"):
        keep(history, "lost") if use == "save" else history.recent()
    aside = history.path.with_name("chats.sqlite3.aside")
    assert history.recent() == []
    keep(history, "after")
    assert history.recent() == [("after", "r")]
    assert aside.read_bytes() == before
    assert history.damaged == [aside]
    history.clear()
    assert not aside.exists()


def test_a_row_that_is_far_too_large_is_damage(history: History) -> None:
    keep(history, "before")
    change(history, "UPDATE conversation SET turns = hex(zeroblob(4000000))")
    with pytest.raises(HistoryUnusable, match="is damaged"):
        history.recent()


def test_a_newer_version_is_left_alone(history: History) -> None:
    keep(history, "before")
    change(history, "PRAGMA user_version = 2")
    before = history.path.read_bytes()
    for use in (history.recent, lambda: keep(history, "q")):
        with pytest.raises(HistoryUnusable, match="has version 2, but this edgellm reads version 1"):
            use()
    assert history.path.read_bytes() == before


def test_processes_that_add_read_and_remove_do_not_disturb_each_other(history: History) -> None:
    program = (
        "import sys; from pathlib import Path; from edgellm.storage.chat_log import *\n"
        "history, name = History(Path(sys.argv[1])), sys.argv[2]\n"
        "for number in range(20):\n"
        "    history.save(talk := Conversation.new().with_turns([('user', f'{name} {number}')]))\n"
        "    if number % 2: history.remove(talk)\n"
        "    assert (talk.title in [one.title for one in history.all()]) == (number % 2 == 0)\n"
    )
    users = [subprocess.Popen([sys.executable, "-c", program, str(history.folder), name], cwd=ROOT) for name in "abc"]
    assert [user.wait() for user in users] == [0, 0, 0]
    titles = sorted(one.title for one in history.all())
    assert titles == sorted(f"{name} {number}" for name in "abc" for number in range(0, 20, 2))
    with closing(raw(history)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_while_another_process_writes_nobody_else_does(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(history, "q")
    monkeypatch.setattr(state, "LOCK_SECONDS", 0)
    with closing(raw(history)) as db:
        db.execute("BEGIN IMMEDIATE")
        for use in (lambda: keep(history, "q"), history.expire):
            with pytest.raises(HistoryUnusable, match="in use by another process"):
                use()
        assert len(history.recent()) == 1  # reading needs no turn
    keep(history, "q")
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
    keep(history, "before")
    before = history.path.read_bytes()
    request.getfixturevalue("full")
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        keep(history, "lost", "r" * 10_000)
    assert history.path.read_bytes() == before
    assert history.recent() == [("before", "r")]


def begun(*texts: str, ago: float = 0.0) -> Conversation:
    turns = tuple((("user", "assistant")[at % 2], text) for at, text in enumerate(texts))
    made = Conversation.new()
    return Conversation(made.id, datetime.now(UTC) - timedelta(seconds=ago), turns, page='{"nodes": []}')


def test_what_is_kept_is_found_again_by_the_user_alone(history: History) -> None:
    old, new = begun("Where?", "There.", ago=60), begun("Ein Glas\n\nWhere is é?", "Here\ud800.")
    for one in (new, old):
        history.save(one)
    assert [one.id for one in history.all()] == [new.id, old.id]
    assert history.latest().turns[1] == ("assistant", "Here?.")
    assert history.latest().title == "Where is é?"
    assert history.find(old.id[:5]) == old
    assert stat.S_IMODE(history.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.folder.stat().st_mode) == 0o700
    longer = old.with_turns([*old.turns, ("user", "Why?"), ("assistant", "So.")])
    history.save(longer)
    assert [one.id for one in history.all()] == [old.id, new.id]
    assert history.latest().turns == longer.turns
    history.remove(longer)
    assert [one.id for one in history.all()] == [new.id]
    history.clear()
    assert history.all() == []


def test_one_that_is_not_there_or_not_alone_is_told(history: History) -> None:
    for call in (history.latest, lambda: history.find("ab"), lambda: history.find("")):
        with pytest.raises(InvalidOption):
            call()
    for conversation_id in ("abcd0000", "abcd0001"):
        history.save(replace(begun("Where?"), id=conversation_id))
    with pytest.raises(InvalidOption, match="There are 2 conversations"):
        history.find("abcd")


def test_the_oldest_go_and_too_long_a_one_is_not_kept(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_log, "MAX_CONVERSATIONS", 3)
    kept = [begun(str(number), ago=100 - number) for number in range(5)]
    for one in kept:
        history.save(one)
    assert [one.id for one in history.all()] == [one.id for one in reversed(kept[2:])]
    with pytest.raises(HistoryUnusable, match="can be stored"):
        history.save(kept[4].with_turns([("user", "a" * 2**20)]))
    assert history.latest() == kept[4]


def stored(turns: str) -> str:
    return f'{{"turns": {turns}, "name": "", "page": ""}}'


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]x", "3", "[" * 9999, "[]", b"\xff", '{"turns": []}', stored("1"), stored("[[1]]"),
        stored('[["god", "?"]]'), stored('[["user", "a", "b"]]'),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_passed_over(history: History, text: object) -> None:
    history.save(begun("Where?"))
    when = int(datetime.now(UTC).timestamp() * 1e6)
    change(history, "INSERT INTO conversation VALUES ('00000000', ?, ?)", when, text)
    change(history, "INSERT INTO conversation VALUES ('\x1b[2J', ?, ?)", when, stored("[]"))
    change(history, "INSERT INTO conversation VALUES ('11111111', 'x', ?)", stored("[]"))
    assert [one.title for one in history.all()] == ["Where?"]
    assert history.get("00000000") is None


def test_a_conversation_that_was_removed_leaves_no_trace(history: History) -> None:
    """Also not where SQLite moved it from one page to another."""
    rng = random.Random(7)
    marks: dict[str, str] = {}
    for number in range(300):
        one = begun(f"<{number:05}>" * rng.choice([5, 30, 150, 900]))
        if marks and rng.random() < 0.6:
            one = replace(one, id=rng.choice(list(marks)))
        history.save(one)
        marks[one.id] = f"<{number:05}>"
    for one in history.all():
        if rng.random() < 0.7:
            history.remove(one)
            del marks[one.id]
    found = b"".join(path.read_bytes() for path in history.folder.iterdir())
    assert {mark for number in range(300) if (mark := f"<{number:05}>").encode() in found} == {*marks.values()}

"""Past conversations: kept, bounded, the user's alone, and forgotten when asked; also after a crash."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgellm import state
from edgellm.errors import HistoryUnusable, InvalidOption
from edgellm.state import hold_lock
from edgellm.storage import chat_log
from edgellm.storage.chat_log import Conversation, History
from tests.storage.chats import keep


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
    shutil.rmtree(history.path)
    history.path.touch()  # nobody is bothered with what is wrong where it is off
    keep(history, "q")
    assert history.recent() == []


def test_turned_off_while_waiting_is_off(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(history, "before")
    asked = threading.Event()

    def asking(path: Path) -> AbstractContextManager[None]:
        asked.set()
        return hold_lock(path)

    monkeypatch.setattr(chat_log, "hold_lock", asking)
    with hold_lock(history.folder / "lock"):
        adding = threading.Thread(target=keep, args=(history, "meanwhile"))
        adding.start()
        assert asked.wait(60)
        history.turn_off()
    adding.join()
    history.turn_on()
    assert history.recent() == [("before", "r")]


def test_clear_removes_everything_from_the_disk(history: History) -> None:
    history.clear()
    assert not history.folder.parent.exists()
    keep(history, "a secret")
    (history.path / "damaged").write_text("a secret")
    history.turn_off()
    history.clear()
    assert sorted(path.name for path in history.folder.iterdir()) == ["lock", "off"]
    history.turn_on()
    assert history.recent() == []


EVERY_USE: list[Callable[[History], object]] = [
    lambda history: keep(history, "q"),
    lambda history: history.recent(),
    lambda history: history.turn_off(),
]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_the_user_can_read_it(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # not at some later moment, but from the first
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    before = os.umask(0)
    try:
        keep(history, "q")
        history.turn_off()
    finally:
        os.umask(before)
    assert mode(history.folder) == mode(history.path) == 0o700
    assert [mode(path) for path in history.folder.rglob("*") if path.is_file()] == [0o600] * 3  # one chat, lock, off


@pytest.mark.parametrize("use", EVERY_USE)
def test_a_file_in_the_folders_place_is_told_and_stays(history: History, use: Callable[[History], object]) -> None:
    history.folder.parent.mkdir()
    history.folder.write_text("mine")
    history.folder.chmod(0o644)
    with pytest.raises(HistoryUnusable, match="not a folder"):
        use(history)
    assert (history.folder.read_text(), mode(history.folder)) == ("mine", 0o644)


ROOT = Path(__file__).parents[2]


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
    assert len(list(history.path.iterdir())) == len(titles)


def test_while_another_process_writes_nobody_else_does(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(history, "q")
    monkeypatch.setattr(state, "LOCK_SECONDS", 0)
    with hold_lock(history.folder / "lock"):
        with pytest.raises(HistoryUnusable, match="in use by another process"):
            keep(history, "q")
        assert len(history.recent()) == 1  # reading needs no turn
    keep(history, "q")
    assert len(history.recent()) == 2


def test_a_full_disk_is_told_and_leaves_what_was_there(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keep(history, "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        keep(history, "lost")
    assert len(list(history.path.iterdir())) == 1
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


def stored(turns: object, when: object = "2999-01-01T00:00:00+00:00") -> bytes:
    return json.dumps({"when": when, "turns": turns, "name": "", "page": ""}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]x", b"3", b"[" * 9999, b"[]", b"\xff", bytes(4096), b'{"turns": []}', stored(1), stored([[1]]),
        stored([["god", "?"]]), stored([["user", "a", "b"]]), stored([], "x"), stored([], 1), b" " * 2**20 + stored([]),
        "a pipe", "a folder", Path("link"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_passed_over_and_named(history: History, data: bytes | str | Path) -> None:
    history.save(begun("Where?"))
    (history.path / "\x1b[2J.json").write_bytes(stored([]))
    path, mine = history.path / "00000000.json", history.folder / "mine"
    mine.write_bytes(stored([]))
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif isinstance(data, Path):
        path.symlink_to(mine)
    else:
        {"a pipe": os.mkfifo, "a folder": os.mkdir}[data](path)
    assert [one.title for one in history.all()] == ["Where?"]
    assert history.get("00000000") is None
    assert {path.name for path in history.damaged} == {"00000000.json", "\x1b[2J.json"}
    history.save(replace(begun("There."), id="00000000"))
    assert {one.title for one in history.all()} == {"Where?", "There."}
    assert mine.read_bytes() == stored([])

"""What earlier versions kept in files of their own is taken over: once, all of it, and as private as before."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from edgellm.errors import HistoryUnusable
from edgellm.places import data_dir, state_dir
from edgellm.storage import ChatEntry, History, chat_takeover, private_database
from edgellm.storage.chat_log import Conversations, typed_lines
from edgellm.storage.chat_takeover import old_prompt_file
from edgellm.storage.retention import set_max_age
from tests.storage.chats import change, database

ROOT = Path(__file__).parents[2]
NOW = datetime.now(UTC).replace(microsecond=0)
SAID = [("Where is my mug?", "On the shelf."), ("Größe?\n\u2028\0", "XL"), ("Again?", "Yes."), ("Again?", "Yes.")]
TYPED = ["Where is my mug?", "/help"]
DAMAGED = (
    b"not json",
    b"[]",
    b'"text"',
    b"3",
    b"{}",
    b'{"when": "2026-11-21T11:02:56+00:00", "question": "cut',
    b'{"when": "2026-11-21T11:02:56+00:00", "question": "no reply"}',
    b'{"when": "2026-11-21T11:02:56+00:00", "question": 1, "reply": "x"}',
    b'{"when": "2026-11-21T11:02:56+00:00", "question": "\xff", "reply": "x"}',
    b'{"when": "yesterday", "question": "q", "reply": "r"}',
    b'{"when": 5, "question": "q", "reply": "r"}',
    b'{"when": "2026-11-21T11:02:56", "question": "in no zone", "reply": "r"}',
    b'{"when": "0001-01-01T00:00:00+23:00", "question": "before all time", "reply": "r"}',
    b"[" * 100_000,
    b"\0" * 4096,
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EDGELLM_HISTORY_KEEP", raising=False)


def line(question: str, reply: str = "", when: datetime = NOW) -> bytes:
    said = {"when": when.isoformat(timespec="seconds"), "question": question, "reply": reply}
    return json.dumps(said, ensure_ascii=False).encode() + b"\n"


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def put_replies(data: bytes | None = None) -> Path:
    return put(data_dir() / "history" / "conversations.jsonl", data or b"".join(line(*said) for said in SAID))


def put_typed() -> Path:
    return put(data_dir() / "history" / "typed.jsonl", b"".join(line(text) for text in TYPED))


def put_conversation(number: str, *texts: str, when: datetime = NOW) -> Path:
    turns = [(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]
    data = json.dumps({"when": when.isoformat(timespec="microseconds"), "turns": turns}).encode()
    return put(data_dir() / "conversations" / f"{number}.json", data)


def said() -> list[tuple[str, str]]:
    return [(entry.question, entry.reply) for entry in History().recent()]


def files() -> list[str]:
    root = Path(os.environ["EDGELLM_HOME"])
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


READERS: list[Callable[[], object]] = [
    lambda: History().recent(),
    lambda: History().facts(),
    lambda: History().expire(),
    lambda: History().add("new", "r"),
    lambda: typed_lines().recent(),
    lambda: Conversations().all(),
    lambda: Conversations().expire(),
]


@pytest.mark.parametrize("first", READERS)
def test_whatever_is_used_first_takes_over_everything(first: Callable[[], object]) -> None:
    put_replies()
    put_typed()
    put(old_prompt_file(), b"\n# 2026-01-01\n+two\n+lines\n\n# 2026-01-02\n+one\n")
    put_conversation("00000001", "Where?", "There.", when=NOW - timedelta(hours=1))
    put_conversation("00000002", "Why?")
    for lock in ("history", "conversations"):
        put(data_dir() / lock / "lock", b"")
    first()
    assert files() == ["data/history/chats.lock", "data/history/chats.sqlite3"]
    assert not (data_dir() / "conversations").exists()
    assert said()[:4] == SAID
    assert History().recent()[0] == ChatEntry(*SAID[0], NOW)
    assert [entry.question for entry in typed_lines().recent()] == ["two\nlines", "one", *TYPED]
    newest, oldest = Conversations().all()
    assert (newest.id, newest.turns) == ("00000002", (("user", "Why?"),))
    assert (oldest.id, oldest.when) == ("00000001", NOW - timedelta(hours=1))
    History().add("new", "r")
    assert said()[-1] == ("new", "r")
    assert stat.S_IMODE(History().path.stat().st_mode) == 0o600


def interrupted(home: Path, operation: str) -> list[dict[str, Any]]:
    """Return what is found after each interruption."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.interrupted", str(home), operation], cwd=ROOT, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    trials: list[dict[str, Any]] = [json.loads(found) for found in done.stdout.splitlines()]
    assert [trial["killed"] for trial in trials] == [True] * (len(trials) - 1) + [False]
    assert len(trials) > 20
    return trials


def test_nothing_is_lost_or_doubled_wherever_the_process_is_killed(tmp_path: Path) -> None:
    put_replies(b"".join(line(*said) for said in SAID[:3]) + b"half a li\n" + line(*SAID[3]))
    put_typed()
    put(old_prompt_file(), b"\n# 2026-01-01\n+typed long ago\n")
    put_conversation("00000001", "Where?", "There.")
    put_conversation("00000002", "Why?")
    put(data_dir() / "conversations" / "00000003.json", b"{")
    for trial in interrupted(tmp_path / "home", "recent"):
        assert trial["found"] == {
            "replies": [list(said) for said in SAID],
            "typed": ["typed long ago", *TYPED],
            "conversations": [
                ["00000001", ["user", "Where?"], ["assistant", "There."]], ["00000002", ["user", "Why?"]],
            ],
        }  # fmt: skip
        left = {name: data for name, data in trial["left"].items() if name.endswith((".json", ".jsonl"))}
        assert left == {"data/history/conversations.jsonl": "half a li\n", "data/conversations/00000003.json": "{"}


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_stays_where_it_is(damaged: bytes) -> None:
    path = put_replies(line("before") + damaged + b"\n" + line("after"))
    os.utime(path, (1e9, 1e9))
    assert said() == [("before", ""), ("after", "")]
    assert path.read_bytes() == damaged + b"\n"
    assert (path.stat().st_mtime, stat.S_IMODE(path.stat().st_mode)) == (1e9, 0o600)
    assert said() == [("before", ""), ("after", "")]
    assert History().facts().size > len(damaged)
    set_max_age(None)
    History().expire()
    assert path.exists()
    set_max_age(timedelta(days=365))
    History().expire()
    assert not path.exists()
    assert len(said()) == 2


def test_a_line_cut_by_a_crash_does_not_take_the_next_with_it() -> None:
    put_replies(line("before") + line("cut")[:-9] + b"\n" + line("after"))
    assert [question for question, _ in said()] == ["before", "after"]


def test_a_surrogate_in_the_file_does_not_come_out_of_it() -> None:
    put_replies(b'{"when": "%d-01-02T00:30:00+01:00", "question": "\\ud800", "reply": "r"}\n' % NOW.year)
    set_max_age(None)
    assert History().recent() == [ChatEntry("\ufffd", "r", datetime(NOW.year, 1, 1, 23, 30, tzinfo=UTC))]


def test_a_file_that_is_far_too_large_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_takeover, "MAX_BYTES", 4096)
    path = put_replies(b"".join(line(f"question {number}", "reply") for number in range(200)))
    found = said()
    assert 30 < len(found) < 60
    assert found[-1] == ("question 199", "reply")
    assert not path.exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.with_name("mine"))])
def test_what_is_no_file_is_not_touched(make: Callable[[Path], object]) -> None:
    """And nothing waits for it, or goes through it."""
    folder = data_dir() / "history"
    mine = put(folder / "mine", line("mine", "mine"))
    paths = [folder / "conversations.jsonl", folder / "typed.jsonl", data_dir() / "conversations" / "00000001.json"]
    paths[2].parent.mkdir()
    for path in paths:
        make(path)
    kinds = [path.lstat().st_mode for path in paths]
    History().add("q", "r")
    assert said() == [("q", "r")]
    assert (typed_lines().recent(), Conversations().all()) == ([], [])
    assert [path.lstat().st_mode for path in paths] == kinds
    assert mine.read_bytes() == line("mine", "mine")


def test_a_folder_of_conversations_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    put_conversation("00000001", "mine").parent.rename(tmp_path / "elsewhere")
    (data_dir() / "conversations").symlink_to(tmp_path / "elsewhere")
    put_replies()
    assert said() == SAID
    assert Conversations().all() == []
    assert Conversations().clear() == 0
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["00000001.json"]


def test_what_is_too_old_is_neither_read_nor_kept() -> None:
    old = NOW - timedelta(days=400)
    put_replies(line("a secret", when=old) + line("young"))
    put_conversation("00000001", "a secret", when=old)
    path = put(old_prompt_file(), b"+a secret\n")
    os.utime(path, (old.timestamp(),) * 2)
    assert said() == [("young", "")]
    assert (Conversations().all(), typed_lines().recent()) == ([], [])
    set_max_age(None)  # a greater age brings them back, as it did before
    assert (len(said()), len(Conversations().all()), len(typed_lines().recent())) == (2, 1, 1)
    set_max_age(timedelta(days=365))
    for log in (History(), Conversations(), typed_lines()):
        assert log.expire() == 1
    assert not [path for path in (data_dir() / "history").iterdir() if b"a secret" in path.read_bytes()]


def test_while_the_history_is_off_nothing_of_it_is_read() -> None:
    put_replies()
    put(old_prompt_file(), b"+typed\n")
    before = files()
    History().turn_off()
    assert History().recent() == []
    History().add("q", "r")
    assert set(before) == {*files()} - {"data/history/off"}
    assert History().facts().conversations == 4
    assert old_prompt_file().exists()
    History().turn_on()
    assert said() == SAID
    assert [entry.question for entry in typed_lines().recent()] == ["typed"]


def test_an_older_version_may_go_on_writing() -> None:
    put_replies()
    put_conversation("00000001", "Where?")
    assert said() == SAID
    History().add("new", "r")
    put_replies(line("old again", "r"))
    put_conversation("00000001", "Where?", "There.", "Why?", when=NOW + timedelta(seconds=1))
    put_conversation("00000002", "How?")
    assert said() == [*SAID, ("new", "r"), ("old again", "r")]
    assert {one.id: len(one.turns) for one in Conversations().all()} == {"00000001": 3, "00000002": 1}
    put_conversation("00000001", "Where?", when=NOW - timedelta(days=1))
    assert {one.id: len(one.turns) for one in Conversations().all()} == {"00000001": 3, "00000002": 1}
    assert files() == ["data/history/chats.lock", "data/history/chats.sqlite3"]


def test_what_an_older_version_added_after_an_interruption_is_taken_over_alone() -> None:
    path = put_replies()
    lines = path.read_bytes()
    assert said() == SAID
    put_replies(lines + line("later"))
    mark = (path.name, len(lines), sha256(lines).digest())  # as of a process that was killed before it removed the file
    change(History(), "INSERT INTO taken_over VALUES (?, ?, ?)", *mark)
    assert said() == [*SAID, ("later", "")]
    put_replies(lines)
    assert said() == [*SAID, ("later", ""), *SAID]  # the same again is something else


def test_while_an_older_version_writes_its_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_database, "LOCK_SECONDS", 0)
    History().add("q", "r")
    for lock in (data_dir() / "history" / "lock", put(data_dir() / "conversations" / "lock", b"")):
        path = put_replies()
        with FileLock(lock), pytest.raises(HistoryUnusable, match="in use by another process"):
            History().recent()
        assert path.exists()
    assert said() == [("q", "r"), *SAID]


def test_a_file_that_cannot_be_removed_is_told_and_not_taken_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    History().add("q", "r")
    path = put_replies()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
        for _ in range(2):
            with pytest.raises(HistoryUnusable, match=r"conversations\.jsonl cannot be removed: not permitted"):
                History().recent()
    assert path.exists()
    assert said() == [("q", "r"), *SAID]
    assert not path.exists()


def test_clearing_removes_what_could_not_be_read_too() -> None:
    path = put_replies(b"a secret\n" + line("a secret"))
    beside = put(path.with_name("conversations.jsonl.new"), b"a secret")
    put(data_dir() / "conversations" / "00000001.json", b"a secret")
    assert History().clear() == 1
    assert Conversations().clear() == 1
    assert not beside.exists()
    assert files() == ["data/history/chats.lock", "data/history/chats.sqlite3"]
    assert b"a secret" not in History().path.read_bytes()


def test_clearing_that_was_interrupted_leaves_all_or_nothing_and_can_be_done_again(tmp_path: Path) -> None:
    for number in range(50):
        History().add("a secret" * number, "r")
    everything = [entry.question for entry in History().recent()]
    for trial in interrupted(tmp_path / "home", "clear"):
        assert [question for question, _ in trial["found"]["replies"]] in ([], everything)
        assert "a secret" not in "".join(trial["left"].values())


def test_a_damaged_database_takes_nothing_with_it() -> None:
    History().add("q", "r")
    put(History().path, b"no database" * 1000)
    path = put_replies()
    with pytest.raises(HistoryUnusable, match=r"was renamed to chats\.sqlite3\.aside"):
        History().recent()
    assert path.exists()
    assert said() == SAID


def test_a_disk_that_is_full_leaves_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    History().add("q", "r")
    before = put_replies(b"".join(line("q" * 1000) for _ in range(100))).read_bytes()
    connect = sqlite3.connect

    def full(*args: Any, **more: Any) -> sqlite3.Connection:
        db = connect(*args, **more)
        db.execute("PRAGMA max_page_count = 1")
        return db

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(HistoryUnusable, match="the disk is full"):
            History().recent()
    assert (data_dir() / "history" / "conversations.jsonl").read_bytes() == before
    assert len(said()) == 101


def test_two_processes_take_over_once() -> None:
    program = (
        "import sys; from edgellm.storage import History\n"
        "print('ready', flush=True); sys.stdin.readline(); print(len(History().recent()))"
    )
    for _ in range(3):
        put_replies(b"".join(line(f"question {number}") for number in range(1000)))
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", program], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(3)
        ]
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        for reader in readers:
            assert reader.stdin is not None
            reader.stdin.write("go\n")
            reader.stdin.flush()
        assert {reader.communicate()[0] for reader in readers} == {"1000\n"}
        History().clear()


def test_all_of_a_full_history_fits() -> None:
    entries = [(f"question {number}", "r" * 60) for number in range(7000)]
    data = b"".join(line(*entry) for entry in entries)
    assert 2**20 - 2**17 < len(data) < 2**20
    put_replies(data)
    assert said() == entries
    History().add("new", "r")
    assert said() == [*entries, ("new", "r")]


def test_nothing_there_is_nothing_taken_over() -> None:
    assert said() == []
    assert files() == []
    assert not state_dir().exists()


def test_the_marks_of_a_take_over_do_not_stay() -> None:
    put_replies()
    assert said() == SAID
    with closing(database(History())) as db:
        assert db.execute("SELECT * FROM taken_over").fetchall() == []

"""Past conversations outlive a crash, a full disk and each other's writers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import pytest
from filelock import FileLock

from edgellm.errors import HistoryUnusable
from edgellm.storage import ChatEntry, History
from edgellm.storage.chats import history as module

ROOT = Path(__file__).parents[2]
DAMAGED = (
    b"",
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


def said(history: History) -> list[tuple[str, str]]:
    return [(past.question, past.reply) for past in history.recent()]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_passed_over(history: History, line: bytes) -> None:
    history.add("before", "r")
    with history.path.open("ab") as file:
        file.write(line + b"\n")
    history.add("after", "r")
    assert [past.question for past in history.recent()] == ["before", "after"]
    assert history.facts().conversations == 2
    assert history.clear() == 2


def test_a_line_cut_by_a_crash_does_not_take_the_next_with_it(history: History) -> None:
    history.add("before", "r")
    history.add("cut", "r")
    os.truncate(history.path, history.path.stat().st_size - 9)
    history.add("after", "r")
    assert [past.question for past in history.recent()] == ["before", "after"]


def test_a_surrogate_in_the_file_does_not_come_out_of_it(history: History) -> None:
    history.add("q", "r")
    history.path.write_text('{"when": "2026-11-21T11:02:56+01:00", "question": "\\ud800", "reply": "r"}\n')
    assert history.recent() == [ChatEntry("\ufffd", "r", datetime(2026, 11, 21, 10, 2, 56, tzinfo=UTC))]


def test_damaged_lines_go_when_it_is_shortened(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2048)
    history.add("q", "r")
    with history.path.open("ab") as file:
        file.write(b"damaged\n" * 230)
    history.add("new", "r" * 100)
    assert said(history) == [("q", "r"), ("new", "r" * 100)]
    assert b"damaged" not in history.path.read_bytes()


def test_two_processes_lose_and_mix_nothing(history: History) -> None:
    program = (
        "import sys; from pathlib import Path; from edgellm.storage import History\n"
        "history, name = History(Path(sys.argv[1])), sys.argv[2]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for number in range(100): history.add(f'{name} {number}', name * 50 * number)\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(history.folder), name], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name in "ab"
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n")
        assert writer.returncode == 0
    found = said(history)
    for name in "ab":
        own = [pair for pair in found if pair[0].startswith(name)]
        assert own == [(f"{name} {number}", name * 50 * number) for number in range(100)]
    assert len(history.path.read_bytes().splitlines()) == 200


def test_while_another_process_writes_nobody_else_does(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.add("q", "r")
    monkeypatch.setattr(module, "PATIENCE", 0)
    with FileLock(history.folder / "lock"):
        for use in (lambda: history.add("q", "r"), history.clear):
            with pytest.raises(HistoryUnusable, match="in use by another process"):
                use()
        assert len(history.recent()) == 1  # reading needs no turn
    history.add("q", "r")
    assert len(history.recent()) == 2


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk with room for 20 more bytes."""
    written = module._write

    def write(file: FileIO, data: bytes) -> None:
        written(file, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", write)
        yield


def test_a_full_disk_is_told_and_leaves_what_was_there(history: History, request: pytest.FixtureRequest) -> None:
    history.add("before", "r")
    before = history.path.read_bytes()
    request.getfixturevalue("full")
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        history.add("lost", "r")
    assert history.path.read_bytes() == before


def test_a_disk_too_full_to_shorten_leaves_what_was_there(
    history: History, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    history.add("before", "r" * 1000)
    before = history.path.read_bytes()
    request.getfixturevalue("full")
    monkeypatch.setattr(module, "MOST_BYTES", len(before) + 10)
    with pytest.raises(HistoryUnusable, match="the disk is full"):
        history.add("lost", "r")
    assert history.path.read_bytes() == before
    assert sorted(path.name for path in history.folder.iterdir()) == ["conversations.jsonl", "lock"]


def test_a_write_that_ends_early_goes_on(tmp_path: Path) -> None:
    class Hesitant(FileIO):
        def write(self, data: object) -> int:
            return super().write(bytes(data)[:3])  # type: ignore[call-overload]

    with Hesitant(tmp_path / "file", "wb") as file:
        module._write(file, b"all of it")
    assert (tmp_path / "file").read_bytes() == b"all of it"


def test_a_drive_without_locks_is_told(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", none)
    with pytest.raises(HistoryUnusable, match="no file locks"):
        history.add("q", "r")

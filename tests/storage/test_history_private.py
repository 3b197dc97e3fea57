"""Past conversations are the user's alone: no mode, link or other file in their place gives them away."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.errors import HistoryUnusable
from edgellm.storage import History
from edgellm.storage.database import PrivateDatabase

EVERY_USE: list[Callable[[History], object]] = [
    lambda history: history.add("q", "r"),
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
        history.add("q", "r")
        history.turn_off()
    assert mode(history.folder) == 0o700
    assert {mode(path) for path in history.folder.iterdir()} == {0o600}
    assert len(list(history.folder.iterdir())) == 2  # chats, off


@pytest.mark.parametrize("use", EVERY_USE[:2])
def test_what_became_open_to_others_is_closed_again(history: History, use: Callable[[History], object]) -> None:
    history.add("q", "r")
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

    history.add("q", "r")
    monkeypatch.setattr(os, "open", forbidden)
    monkeypatch.setattr(sqlite3, "connect", forbidden)
    with pytest.raises(HistoryUnusable, match=r"cannot be .*: Permission denied\. Check its permissions"):
        use(history)


def test_nothing_of_it_goes_to_other_files(history: History) -> None:
    with PrivateDatabase(history.path, "CREATE TABLE entry (id)", 1).writing() as db:
        settings = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("secure_delete", "temp_store")}
    assert settings == {"secure_delete": 1, "temp_store": 2}  # on; in memory

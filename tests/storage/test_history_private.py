"""Past conversations are the user's alone: no mode, link or other file in their place gives them away."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from edgellm.errors import HistoryUnusable
from edgellm.storage import History
from edgellm.storage.database import PrivateDatabase
from tests.storage.chats import raw
from tests.storage.permissions import obeyed

EVERY_USE: list[Callable[[History], object]] = [
    lambda history: history.add("q", "r"),
    lambda history: history.recent(),
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


def test_the_journal_is_private_too(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    journal = history.path.with_name(f"{history.path.name}-journal")
    with umask(0):
        history.add("a secret", "r")
        with closing(raw(history)) as db:
            db.execute("PRAGMA cache_size = 1")
            db.execute("BEGIN")
            db.execute("UPDATE entry SET reply = hex(zeroblob(100000))")
            assert mode(journal) == 0o600
    assert not journal.exists()


@pytest.mark.parametrize("use", EVERY_USE)
def test_what_became_open_to_others_is_closed_again(history: History, use: Callable[[History], object]) -> None:
    history.add("q", "r")
    history.path.chmod(0o644)
    history.folder.chmod(0o755)
    use(history)
    assert (mode(history.folder), mode(history.path)) == (0o700, 0o600)


@pytest.mark.parametrize("use", EVERY_USE)
@pytest.mark.parametrize("end", ["", "-journal"])
def test_a_link_in_a_files_place_is_refused(
    history: History, tmp_path: Path, use: Callable[[History], object], end: str
) -> None:
    if end:
        history.add("q", "r")
    history.folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine.txt").write_text("mine")
    history.path.with_name(f"{history.path.name}{end}").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(HistoryUnusable, match="is a link, but"):
        use(history)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off()])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_folders_place_is_refused(
    history: History, tmp_path: Path, use: Callable[[History], object], dangling: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    history.folder.parent.mkdir()
    history.folder.symlink_to(elsewhere)
    if not dangling:
        elsewhere.mkdir(mode=0o755)
    with pytest.raises(HistoryUnusable, match="is a link"):
        use(history)
    assert dangling or (list(elsewhere.iterdir()) == [] and mode(elsewhere) == 0o755)
    assert elsewhere.exists() is not dangling


def test_a_pipe_in_the_files_place_is_refused_and_not_waited_for(history: History) -> None:
    history.folder.mkdir(parents=True)
    os.mkfifo(history.path)
    for use in EVERY_USE:
        with pytest.raises(HistoryUnusable, match="not a plain file"):
            use(history)


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off()])
def test_a_file_in_the_folders_place_is_told_and_stays(history: History, use: Callable[[History], object]) -> None:
    history.folder.parent.mkdir()
    history.folder.write_text("mine")
    history.folder.chmod(0o644)
    with pytest.raises(HistoryUnusable, match="not a folder"):
        use(history)
    assert (history.folder.read_text(), mode(history.folder)) == ("mine", 0o644)


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off()])
def test_what_the_system_forbids_is_told(history: History, use: Callable[[History], object]) -> None:
    history.add("q", "r")
    forbidden = r"(Permission denied|unable to open database file)"
    history.folder.chmod(0)
    try:
        with obeyed(), pytest.raises(HistoryUnusable, match=rf"cannot be .*: {forbidden}\. Check its permissions"):
            use(history)
    finally:
        history.folder.chmod(0o700)
    assert len(history.recent()) == 1


def test_in_a_folder_that_cannot_be_written_everything_can_be_read(history: History) -> None:
    history.add("q", "r")
    history.folder.chmod(0o500)
    try:
        with obeyed():
            assert [past.question for past in history.recent()] == ["q"]
            assert history.facts().conversations == 1
            with pytest.raises(HistoryUnusable, match=r"cannot be written: .* Check its permissions"):
                history.add("q", "r")
            history.path.chmod(0o400)
            assert len(history.recent()) == 1
    finally:
        history.folder.chmod(0o700)
    assert len(history.recent()) == 1
    assert mode(history.path) == 0o400


def test_nothing_of_it_goes_to_other_files(history: History) -> None:
    with PrivateDatabase(history.path, "CREATE TABLE entry (id)", 1).writing() as db:
        settings = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("secure_delete", "temp_store")}
    assert settings == {"secure_delete": 1, "temp_store": 2}  # on; in memory

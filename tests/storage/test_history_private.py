"""Past conversations are the user's alone: no mode, link or other file in their place gives them away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.errors import HistoryUnusable
from edgellm.storage import History
from edgellm.storage.chats import history as module

EVERY_USE: list[Callable[[History], object]] = [
    lambda history: history.add("q", "r"),
    lambda history: history.recent(),
    lambda history: history.facts(),
    lambda history: history.clear(),
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
    assert len(list(history.folder.iterdir())) == 3  # conversations, lock, off


def test_a_shortened_file_is_private_too(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2048)
    with umask(0):
        for number in range(40):
            history.add(f"question {number}", "r")
    assert mode(history.path) == 0o600


@pytest.mark.parametrize(
    "use", [lambda history: history.add("q", "r"), lambda history: history.recent(), lambda history: history.facts()]
)
def test_what_became_open_to_others_is_closed_again(history: History, use: Callable[[History], object]) -> None:
    history.add("q", "r")
    history.path.chmod(0o644)
    history.folder.chmod(0o755)
    use(history)
    assert (mode(history.path), mode(history.folder)) == (0o600, 0o700)


@pytest.mark.parametrize("use", EVERY_USE)
@pytest.mark.parametrize("looks_away", [False, True], ids=["there before", "made in between"])
def test_a_link_in_the_files_place_is_refused(
    history: History,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[History], object],
    looks_away: bool,
) -> None:
    history.folder.mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("mine")
    history.path.symlink_to(tmp_path / "mine.txt")
    if looks_away:
        monkeypatch.setattr(Path, "is_symlink", lambda _: False)
    with pytest.raises(HistoryUnusable, match="symbolic link" if looks_away else "is a link, and"):
        use(history)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off(), lambda history: history.turn_on()])
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


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off(), lambda history: history.turn_on()])
def test_a_file_in_the_folders_place_is_told_and_stays(history: History, use: Callable[[History], object]) -> None:
    history.folder.parent.mkdir()
    history.folder.write_text("mine")
    history.folder.chmod(0o644)
    with pytest.raises(HistoryUnusable, match="not a folder"):
        use(history)
    assert (history.folder.read_text(), mode(history.folder)) == ("mine", 0o644)


@pytest.mark.parametrize(
    "use", [lambda history: history.add("q", "r"), lambda history: history.recent(), lambda history: history.turn_off()]
)
def test_a_home_that_is_no_folder_is_told(tmp_path: Path, use: Callable[[History], object]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HistoryUnusable, match=r"Not a directory.*EDGELLM_HOME"):
        use(History(tmp_path / "file" / "history"))


@pytest.mark.parametrize("use", [*EVERY_USE, lambda history: history.turn_off()])
def test_what_the_system_forbids_is_told(
    history: History, monkeypatch: pytest.MonkeyPatch, use: Callable[[History], object]
) -> None:
    history.add("q", "r")

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:  # root may write everywhere, so that real permissions prove nothing
        patch.setattr(os, "open", forbidden)
        with pytest.raises(HistoryUnusable, match=r"cannot be .*: Permission denied\. Check its permissions"):
            use(history)
    assert len(history.recent()) == 1

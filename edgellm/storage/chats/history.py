"""Past questions and replies, kept on this machine alone, so that a later reply can repeat them for free.

Each line holds one question and its reply, as JSON, in a file that only the user can read. The file never exceeds
`MOST_BYTES`: when it would, the oldest lines are removed until half of that is left. Lines are also removed when they
are too old (`chats.retention`). A line that a crash has cut is skipped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from io import FileIO
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import HistoryUnusable
from edgellm.places import data_dir
from edgellm.storage.chats.entries import ChatEntry, from_line, to_line
from edgellm.storage.chats.retention import expired, oldest
from edgellm.storage.state import private_folder

MOST_BYTES = 2**20
PATIENCE = 10.0  # seconds to wait for another process; each holds the file for some milliseconds

# Never follow a link, never wait for a pipe, never change line ends (Windows).
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_HAS_MODES = os.name != "nt"  # there the user's folders are private by other means


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """Facts about a history that reveal nothing that was said; `size` in bytes, on disk."""

    path: Path
    on: bool
    conversations: int
    size: int
    first: datetime | None
    last: datetime | None


@dataclass(frozen=True, slots=True)
class History:
    """The store of past conversations in `folder`, which need not exist yet. Any number of processes may use it.

    Every method raises `HistoryUnusable` where the folder or the file is a link, belongs to somebody else, or cannot be
    read or written. A chat should show that as a notice, and go on: a reply does not depend on the history.
    """

    folder: Path = field(default_factory=lambda: data_dir() / "history")
    name: str = "conversations.jsonl"

    @property
    def path(self) -> Path:
        """The file that holds the conversations. It need not exist."""
        return self.folder / self.name

    @property
    def on(self) -> bool:
        """Whether conversations are kept and read: True unless `turn_off` was called."""
        return not os.path.lexists(self._off)

    @property
    def _off(self) -> Path:
        return self.folder / "off"

    @property
    def _beside(self) -> Path:
        return self.folder / f"{self.name}.new"

    def add(self, question: str, reply: str) -> None:
        """Keep a question and its reply as the newest; do nothing while the history is off.

        Of a text that would take more than about a quarter of `MOST_BYTES` only the beginning is kept. A lone
        surrogate, which is no character, becomes U+FFFD. A chat should turn the error into a notice.

        Raises:
            HistoryUnusable: the disk is full, the folder cannot be written, or another process keeps it locked. The
                history is unchanged.
        """
        if not self.on:
            return
        with _told(self.path, "written"), self._locked():
            if self.on:  # still, after waiting
                self._put(to_line(question, reply, MOST_BYTES // 2))

    def recent(self, limit_bytes: int = MOST_BYTES) -> list[ChatEntry]:
        """Return the newest conversations, oldest first, whose texts take at most `limit_bytes` of UTF-8 together.

        A conversation that is too long for the rest of the limit is skipped. Empty while the history is off.

        Raises:
            HistoryUnusable: the file is a link, or cannot be read.
        """
        if not self.on:
            return []
        with _told(self.path, "read"):
            before = oldest()
            pasts = [past for past in self._pasts() if past.when >= before]
        found: list[ChatEntry] = []
        for past in reversed(pasts):
            size = len((past.question + past.reply).encode())
            if size <= limit_bytes:
                found.append(past)
                limit_bytes -= size
        return found[::-1]

    def clear(self) -> int:
        """Remove all conversations, whether the history is on or off, and return how many there were.

        Raises:
            HistoryUnusable: they cannot be removed.
        """
        with _told(self.path, "removed"):
            if not os.path.lexists(self.folder):
                return 0
            with self._locked():
                count = len(self._pasts())
                self.path.unlink(missing_ok=True)
                self._beside.unlink(missing_ok=True)
                return count

    def expire(self) -> int:
        """Remove conversations older than the retention, whether the history is on or off, and return how many.

        Raises:
            HistoryUnusable: they cannot be removed.
        """
        with _told(self.path, "written"):
            if not os.path.lexists(self.path):
                return 0
            before = oldest()
            with _opened(self.path, "rb") as file:
                if not _begins_before(file, before) and not expired(self.path, before):
                    return 0
            with self._locked(), _opened(self.path, "rb") as file:
                pasts = list(_readable(file))
                young = [line for line, past in pasts if past.when >= before]
                self._replace(b"".join(young))  # damaged lines go with the old ones: their age is unknown
                return len(pasts) - len(young)

    def turn_off(self) -> None:
        """Keep every process from adding or reading until `turn_on`. Conversations that are there stay.

        Raises:
            HistoryUnusable: that cannot be remembered.
        """
        with _told(self.folder, "turned off"):
            self._prepare()
            with suppress(FileExistsError):
                os.close(os.open(self._off, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def turn_on(self) -> None:
        """Undo `turn_off`.

        Raises:
            HistoryUnusable: that cannot be remembered.
        """
        with _told(self.folder, "turned on"), suppress(FileNotFoundError):
            _own(self.folder)
            self._off.unlink()

    def facts(self) -> HistoryFacts:
        """Count the conversations that are there, whether the history is on or off.

        Raises:
            HistoryUnusable: the file is a link, or cannot be read.
        """
        with _told(self.path, "read"):
            times = [past.when for past in self._pasts()]
            size = _size(self.path) + _size(self._beside)
        first, last = (min(times), max(times)) if times else (None, None)
        return HistoryFacts(self.path, self.on, len(times), size, first, last)

    def _pasts(self) -> list[ChatEntry]:
        try:
            _own(self.folder)
            with _opened(self.path, "rb") as file:
                return [past for _, past in _readable(file)]
        except FileNotFoundError:
            return []

    def _put(self, line: bytes) -> None:
        before = oldest()
        with _opened(self.path, "rb+", os.O_CREAT) as file:
            end = file.seek(0, os.SEEK_END)
            if end + len(line) < MOST_BYTES and not _begins_before(file, before):
                _append(file, line, end)
                return
            lines = [line for line, past in _readable(file) if past.when >= before]
        full = sum(map(len, lines)) + len(line) >= MOST_BYTES
        kept, room = [line], (MOST_BYTES // 2 if full else MOST_BYTES) - len(line)
        while lines and len(lines[-1]) <= room:
            kept.append(lines.pop())
            room -= len(kept[-1])
        self._replace(b"".join(reversed(kept)))

    def _replace(self, data: bytes) -> None:
        self._beside.unlink(missing_ok=True)  # left by a crash
        try:
            with _opened(self._beside, "xb") as file:
                _write(file, data)
                os.fsync(file.fileno())
            self._beside.replace(self.path)
        except OSError:
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)
            raise

    def _prepare(self) -> None:
        with suppress(FileNotFoundError):
            _own(self.folder)
        private_folder(self.folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._prepare()
        lock = FileLock(self.folder / "lock", timeout=PATIENCE, mode=0o600)
        with lock.acquire(poll_interval=0.01):
            yield


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    """Turn the system's errors into ours: `path` cannot be `done`."""
    try:
        yield
    except Timeout as error:
        raise HistoryUnusable(f"{path} is in use by another process.", "Try again when that is done.") from error
    except NotImplementedError as error:  # some network drives
        raise HistoryUnusable(
            f"{path} cannot be {done}: the drive has no file locks.", "Set EDGELLM_HOME to a folder on another drive."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HistoryUnusable(
                f"{path} cannot be {done}: the disk is full.", "Make room on it, or set EDGELLM_HOME to another drive."
            ) from error
        raise HistoryUnusable(
            f"{path} cannot be {done}: {error.strerror or error}.",
            "Check its permissions, or set EDGELLM_HOME to a folder of yours.",
        ) from error


def _own(folder: Path) -> None:
    """Check that `folder` is a folder, not a link, and close it to other users. Raise FileNotFoundError without one."""
    mode = folder.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise _link(folder)
    if not stat.S_ISDIR(mode):
        raise HistoryUnusable(f"{folder} is not a folder.", "Move it away; a new one will be made.")
    if _HAS_MODES and mode & 0o077:
        folder.chmod(0o700)


@contextmanager
def _opened(path: Path, mode: str, flags: int = 0) -> Iterator[FileIO]:
    """Open the file, never through a link and unbuffered; make it private if it was not."""
    if path.is_symlink():
        raise _link(path)
    with FileIO(path, mode, opener=lambda name, asked: os.open(name, asked | flags | _FLAGS, 0o600)) as file:
        found = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(found):
            raise HistoryUnusable(f"{path} is not a plain file.", "Move it away; a new one will be made.")
        if _HAS_MODES and found & 0o077:
            os.fchmod(file.fileno(), 0o600)
        yield file


def _link(path: Path) -> HistoryUnusable:
    return HistoryUnusable(
        f"{path} is a link, and the history is kept nowhere but there.",
        "Remove the link; EDGELLM_HOME moves everything.",
    )


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _append(file: FileIO, line: bytes, end: int) -> None:
    """Write `line` at `end`, all of it or nothing; after a line that was cut, begin a new one."""
    file.seek(max(end - 1, 0))
    whole = file.read(1) in (b"\n", b"")
    try:
        _write(file, line if whole else b"\n" + line)
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def _begins_before(file: FileIO, time: datetime) -> bool:
    """Return whether the first line is older than `time`; later lines are younger."""
    file.seek(0)
    past = from_line((file.read(MOST_BYTES // 2) or b"").partition(b"\n")[0])  # no line is longer
    return past is not None and past.when < time


def _write(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _readable(file: FileIO) -> Iterator[tuple[bytes, ChatEntry]]:
    """Yield the sound lines and their entries; of a file that is too large, those at its end."""
    file.seek(max(file.seek(0, os.SEEK_END) - MOST_BYTES, 0))
    for line in file.readall().split(b"\n"):
        if past := from_line(line):
            yield line + b"\n", past

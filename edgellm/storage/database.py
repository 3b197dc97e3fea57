"""An SQLite database that only the user can read, for any number of processes, never accessed through a link.

Each call opens the database and closes it again, so that no write-ahead log stays behind. SQLite gives the log and its
index the mode of the database.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from edgellm.errors import HistoryUnusable
from edgellm.storage import state
from edgellm.storage.state import hold_lock, private_folder, set_aside, system_errors
from edgellm.system import HAS_MODES, NO_LINKS

_MAX_ROW = 4 * 2**20  # bytes
_MIN_FREE = 2**16  # bytes of free space without which the index of the log cannot be made
SETTINGS: tuple[str, ...] = (
    "secure_delete = ON",
    "synchronous = NORMAL",
    "temp_store = MEMORY",
    "trusted_schema = OFF",
)
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
_DAMAGED = {
    sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG,
}  # fmt: skip


class DatabaseDamaged(Exception):
    """The database's content is not as it was written."""


class DatabaseConnection(sqlite3.Connection):
    """A connection that counts the rows that are removed through it."""

    removed = 0

    def remove(self, rows: str, *values: object) -> int:
        """Remove `rows`, a table and perhaps a condition, and return their number."""
        count = self.execute(f"DELETE FROM {rows}", values).rowcount  # noqa: S608  values are bound
        self.removed += count
        return count


@dataclass(frozen=True, slots=True)
class PrivateDatabase:
    """The database at `path`, which need not exist, with the tables that `schema` makes in its `version`.

    Every method raises `HistoryUnusable` if the folder or a file is a link, belongs to another user, or cannot be read
    or written. A damaged database is set aside first, so that the next call creates a new one.
    """

    path: Path
    schema: str
    version: int

    @property
    def exists(self) -> bool:
        """Return whether anything exists at the database's path."""
        try:
            return bool(self.path.lstat())
        except FileNotFoundError:
            return False

    @contextmanager
    def reading(self) -> Iterator[DatabaseConnection]:
        """Yield the database for reading, or an empty one if there is none. A folder that cannot be written, or a full
        disk, does not matter."""
        with self.errors("read"), closing(self._readable() if self.exists else self._empty()) as db:
            yield db

    @contextmanager
    def writing(
        self, action: str = "written", *, keep: bool = False, scrub: bool = False
    ) -> Iterator[DatabaseConnection]:
        """Yield the database, created if it is missing, in one transaction. If that removes rows, or with `scrub`,
        erase all traces of removed rows.

        `action` is the participle used in errors ("cannot be written"). With `keep`, a damaged database is not renamed.
        """
        with self.errors(action, keep=keep):
            private_folder(self.path.parent)
            if not self.exists:
                self._make()
            with closing(self._open("rw")) as db:
                db.execute("BEGIN IMMEDIATE")
                with db:
                    yield db
                if db.removed or scrub:
                    # SQLite zeroes removed rows, but not the copies left where it moved rows between pages before.
                    db.execute("VACUUM")
                    busy = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                    if busy and scrub:  # without scrubbing, the last process that closes the database empties the log
                        raise TimeoutError

    def discard(self) -> None:
        """Remove the files of the database, and files set aside. Unlike removing rows, that needs no free space."""
        with self.errors("removed", keep=True), hold_lock(self._lock):
            self._close_to_others()
            for path in self.aside():
                path.unlink()
            with closing(self._connect("rw")) as db:
                try:
                    db.execute("PRAGMA locking_mode = EXCLUSIVE")
                    db.execute("BEGIN EXCLUSIVE")
                except sqlite3.Error as error:
                    if _code(error) in _BUSY:
                        raise
                for path in self._files():
                    path.unlink(missing_ok=True)

    def aside(self) -> list[Path]:
        """Return the files that were set aside."""
        return sorted(self.path.parent.glob(f"{self.path.name}*.aside*"))

    @contextmanager
    def errors(self, action: str, *, keep: bool = False) -> Iterator[None]:
        """Turn errors of SQLite and of the system into ours: the database cannot be `action`."""
        with system_errors(HistoryUnusable, self.path, action):
            folder = self.path.parent
            if folder.is_symlink():
                raise _link(folder)
            if folder.exists():
                private_folder(folder)
            before = self.path.lstat().st_ino if self.exists else None
            try:
                yield
            except (sqlite3.Error, DatabaseDamaged, UnicodeDecodeError) as error:  # SQLite's message may be no UTF-8
                code = _code(error) if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_CORRUPT
                if code in _BUSY:
                    raise TimeoutError from error
                full = code == sqlite3.SQLITE_IOERR and disk_usage(self.path.parent).free < _MIN_FREE
                if full or code == sqlite3.SQLITE_FULL:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                if code not in _DAMAGED:
                    raise OSError(str(error)) from error
                if keep:
                    raise HistoryUnusable(f"{self.path} is damaged.", "For details, run: edgellm history") from error
                raise HistoryUnusable(
                    f"{self.path} is damaged, and was renamed to {self._set_aside(before)}.",
                    "A new one will be created; `edgellm history clear` removes both.",
                ) from error

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def _files(self) -> list[Path]:
        """Return the paths of the database, its write-ahead log and the log's index."""
        return [self.path.with_name(self.path.name + end) for end in ("", "-wal", "-shm")]

    def _make(self) -> None:
        """Make an empty database in one step, unless another process has made it."""
        with hold_lock(self._lock):
            if self.exists:
                return
            for path in self._files():
                if os.path.lexists(path):  # a log without its database would be taken for that of the new one
                    set_aside(path)
            new = PrivateDatabase(self.path.with_name(f"{self.path.name}.new"), self.schema, self.version)
            for path in new._files():  # a crash may have left files
                path.unlink(missing_ok=True)
            os.close(os.open(new.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o600))
            with closing(new._connect("rw")) as db:
                if db.execute("PRAGMA journal_mode = WAL").fetchone() != (b"wal",):
                    raise NotImplementedError
                self._fill(db)
            new.path.rename(self.path)

    def _empty(self) -> DatabaseConnection:
        db = sqlite3.connect(":memory:", isolation_level=None, factory=DatabaseConnection)
        db.text_factory = bytes
        self._fill(db)
        return db

    def _fill(self, db: DatabaseConnection) -> None:
        db.executescript(f"BEGIN; {self.schema}; PRAGMA user_version = {self.version}; COMMIT;")

    def _readable(self) -> DatabaseConnection:
        """Return a connection for reading, also in a folder that cannot be written, where there is no log."""
        try:
            return self._open("rw")
        except sqlite3.OperationalError as error:
            log = self._files()[1]
            if _code(error) not in _UNWRITABLE or (log.exists() and log.stat().st_size):
                raise
            return self._open("ro&immutable=1")

    def _open(self, mode: str) -> DatabaseConnection:
        """Return a connection to the database, if it holds our tables."""
        self._close_to_others()
        db = self._connect(mode)
        try:
            for setting in SETTINGS:
                db.execute(f"PRAGMA {setting}")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > self.version:
                raise HistoryUnusable(
                    f"{self.path} has version {version}, but this edgellm reads version {self.version}.",
                    "Update edgellm, or move the file away.",
                )
            if version != self.version:
                raise DatabaseDamaged
        except BaseException:
            db.close()
            raise
        return db

    def _connect(self, mode: str) -> DatabaseConnection:
        db = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}", state.LOCK_SECONDS, isolation_level=None,
            factory=DatabaseConnection, uri=True,
        )  # fmt: skip
        db.text_factory = bytes  # readers decode: SQLite keeps any bytes as text
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW)
        return db

    def _close_to_others(self) -> None:
        """Check that the files of the database are plain files, and close them to other users."""
        for path in self._files():
            with suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode):
                    raise _link(path)
                if not stat.S_ISREG(mode):
                    raise HistoryUnusable(f"{path} is not a plain file.", "Move it away; a new one will be created.")
                if HAS_MODES and mode & 0o077:
                    path.chmod(0o600)

    def _set_aside(self, before: int | None) -> str:
        """Rename the files of the database, unless another process has, and return the new name of the first."""
        with hold_lock(self._lock):
            if self.path.lstat().st_ino != before:
                return self.aside()[-1].name
            aside = set_aside(self.path)
            for path in self._files()[1:]:
                with suppress(FileNotFoundError):
                    path.rename(aside.with_name(path.name.replace(self.path.name, aside.name)))
            return aside.name


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's error code. Raise the error itself if it comes from the Python module."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None:
        raise error
    return code & 0xFF


def _link(path: Path) -> HistoryUnusable:
    return HistoryUnusable(
        f"{path} is a link, but the history must be stored in place.",
        "Remove the link; to move all data, set EDGELLM_HOME.",
    )

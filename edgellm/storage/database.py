"""An SQLite database that only the user can read, for any number of processes, never accessed through a link.

Each call opens the database and closes it again. SQLite gives its journal the mode of the database.
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

from edgellm.errors import HistoryUnusable
from edgellm.storage import state
from edgellm.storage.state import private_folder, set_aside, system_errors
from edgellm.system import HAS_MODES, NO_LINKS

_MAX_ROW = 4 * 2**20  # bytes
SETTINGS: tuple[str, ...] = ("secure_delete = ON", "temp_store = MEMORY", "trusted_schema = OFF")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
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
    """The database at `path`, which need not exist, with the tables that `schema` makes in its `version`. Every method
    raises `HistoryUnusable` if the folder belongs to another user, a file is a link, or they cannot be read or written.
    A damaged database is set aside first, so that the next call creates a new one."""

    path: Path
    schema: str
    version: int

    @contextmanager
    def reading(self) -> Iterator[DatabaseConnection]:
        """Yield the database for reading, or an empty one if there is none. The folder need not be writable."""
        with self.errors("read"), closing(self._open(":memory:" if self.is_missing else self.path)) as db:
            yield db

    @contextmanager
    def writing(self, action: str = "written", *, keep: bool = False) -> Iterator[DatabaseConnection]:
        """Yield the database, created if it is missing, in one transaction. If that removes rows, erase their traces.
        `action` is the participle used in errors ("cannot be written"). With `keep`, a damaged database is not
        renamed."""
        with self.errors(action, keep=keep):
            private_folder(self.path.parent)
            if self.is_missing:
                with suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o600))
            with closing(self._open(self.path)) as db:
                db.execute("BEGIN IMMEDIATE")
                with db:
                    yield db
                if db.removed:
                    # SQLite zeroes removed rows, but not the copies left where it moved rows between pages before.
                    db.execute("VACUUM")

    def remove(self) -> None:
        """Remove the files of the database, and files set aside."""
        with self.errors("removed"):
            self._close_files()
            for path in (*self._files(), *self.aside()):
                path.unlink(missing_ok=True)

    @property
    def is_missing(self) -> bool:
        """Return whether nothing is at the database's path."""
        return not os.path.lexists(self.path)

    def aside(self) -> list[Path]:
        """Return the files that were set aside."""
        return sorted(self.path.parent.glob(f"{self.path.name}*.aside*"))

    @contextmanager
    def errors(self, action: str, *, keep: bool = False) -> Iterator[None]:
        """Turn errors of SQLite and of the system into ours: the database cannot be `action`."""
        with system_errors(HistoryUnusable, self.path, action):
            if os.path.lexists(self.path.parent):
                private_folder(self.path.parent)
            before = None if self.is_missing else self.path.lstat().st_ino
            try:
                yield
            except (sqlite3.Error, DatabaseDamaged, UnicodeDecodeError) as error:  # SQLite's message may be no UTF-8
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                if code in _BUSY:
                    raise TimeoutError from error
                if code not in _DAMAGED:
                    number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else 0
                    raise OSError(number, os.strerror(number) if number else str(error)) from error
                if keep:
                    raise HistoryUnusable(f"{self.path} is damaged.", "For details, run: edgellm history") from error
                raise HistoryUnusable(
                    f"{self.path} is damaged, and was renamed to {self._set_aside(before)}.",
                    "A new one will be created; `edgellm history clear` removes both.",
                ) from error

    def _files(self) -> tuple[Path, Path]:
        return self.path, self.path.with_name(f"{self.path.name}-journal")

    def _close_files(self) -> None:
        """Check that the files of the database are plain files, and close them to other users."""
        for path in self._files():
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(mode := path.lstat().st_mode):
                    raise HistoryUnusable(f"{path} is not a plain file.", "Move it away; a new one will be created.")
                if HAS_MODES and mode & 0o077:
                    path.chmod(0o600)

    def _open(self, where: Path | str) -> DatabaseConnection:
        """Return a connection to the database, or to one in memory, with our tables."""
        self._close_files()
        db = sqlite3.connect(
            where if isinstance(where, str) else f"{where.absolute().as_uri()}?mode=rw", state.LOCK_SECONDS,
            isolation_level=None, factory=DatabaseConnection, uri=True,
        )  # fmt: skip
        try:
            db.text_factory = bytes  # readers decode: SQLite keeps any bytes as text
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW)
            for setting in SETTINGS:
                db.execute(f"PRAGMA {setting}")
            self._fill(db)
        except BaseException:
            db.close()
            raise
        return db

    def _fill(self, db: DatabaseConnection) -> None:
        version, tables = _begun(db)
        if version == tables == 0:
            with db:
                db.execute("BEGIN IMMEDIATE")
                if _begun(db) == (0, 0):  # no other process was faster
                    for statement in (*self.schema.split(";"), f"PRAGMA user_version = {self.version}"):
                        db.execute(statement)
        elif version > self.version:
            raise HistoryUnusable(
                f"{self.path} has version {version}, but this edgellm reads version {self.version}.",
                "Update edgellm, or move the file away.",
            )
        elif version != self.version:
            raise DatabaseDamaged

    def _set_aside(self, before: int | None) -> str:
        """Rename the files of the database, unless another process has, and return the new name of the first."""
        if self.is_missing or self.path.lstat().st_ino != before:
            return self.aside()[-1].name
        aside, journal = set_aside(self.path), self._files()[1]
        with suppress(FileNotFoundError):
            journal.rename(aside.with_name(f"{journal.name}{aside.name.removeprefix(self.path.name)}"))
        return aside.name


def _begun(db: DatabaseConnection) -> tuple[int, int]:
    """Return the version that a database says it has, and the number of its tables."""
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return db.execute("PRAGMA user_version").fetchone()[0], tables[0]

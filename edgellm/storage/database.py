"""An SQLite database that only the user can read, for any number of processes.

Each call opens the database and closes it again. SQLite gives its journal the mode of the database.
"""

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgellm import state
from edgellm.errors import HistoryUnusable
from edgellm.state import private_folder, set_aside, system_errors
from edgellm.system import HAS_MODES, NO_LINKS

_MAX_ROW = 4 * 2**20  # bytes
SETTINGS: tuple[str, ...] = ("secure_delete = ON", "temp_store = MEMORY", "trusted_schema = OFF")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_DAMAGED = {
    sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG,
}  # fmt: skip


class DatabaseConnection(sqlite3.Connection):
    """A connection that counts the rows that are removed through it."""

    removed = 0

    def remove(self, rows: str, *values: object) -> None:
        """Remove `rows`, a table and perhaps a condition."""
        self.removed += self.execute(f"DELETE FROM {rows}", values).rowcount  # noqa: S608  values are bound


@dataclass(frozen=True, slots=True)
class PrivateDatabase:
    """The database at `path`, which need not exist, with the tables of `schema` in its `version`. Every method raises
    `HistoryUnusable` where a file cannot be used; a damaged database is set aside first, and made anew by the next
    call."""

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
        """Yield the database in one transaction, and erase the traces of removed rows. It cannot be `action` in errors;
        with `keep`, a damaged one is not renamed."""
        with self.errors(action, keep=keep):
            private_folder(self.path.parent)
            if self.is_missing:
                os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY | NO_LINKS, 0o600))
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
            for path in (self.path, self._journal, *self.aside()):
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
            try:
                yield
            except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's message may be no UTF-8
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                if code in _BUSY:
                    raise TimeoutError from error
                if code not in _DAMAGED:
                    raise OSError(errno.ENOSPC if code == sqlite3.SQLITE_FULL else 0, str(error)) from error
                if keep:
                    raise HistoryUnusable(f"{self.path} is damaged.", "For details, run: edgellm history") from error
                raise HistoryUnusable(
                    f"{self.path} is damaged, and was renamed to {self._set_aside().name}.",
                    "A new one will be created; `edgellm history clear` removes both.",
                ) from error

    @property
    def _journal(self) -> Path:
        return self.path.with_name(f"{self.path.name}-journal")

    def _open(self, where: Path | str) -> DatabaseConnection:
        """Return a connection to the database, or to one in memory, with our tables."""
        for path in (self.path, self._journal):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(mode := path.lstat().st_mode):
                    raise HistoryUnusable(f"{path} is not a plain file.", "Move it away; a new one will be created.")
                if HAS_MODES and mode & 0o077:
                    path.chmod(0o600)
        db = sqlite3.connect(
            where if isinstance(where, str) else f"{where.absolute().as_uri()}?mode=rw", state.LOCK_SECONDS,
            isolation_level=None, factory=DatabaseConnection, uri=True,
        )  # fmt: skip
        try:
            db.text_factory = bytes  # readers decode: SQLite keeps any bytes as text
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_ROW)
            for setting in SETTINGS:
                db.execute(f"PRAGMA {setting}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > self.version:
                raise HistoryUnusable(
                    f"{self.path} has version {version}, but this edgellm reads version {self.version}.",
                    "Update edgellm, or move the file away.",
                )
            if version < self.version:
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    for statement in (*self.schema.split(";"), f"PRAGMA user_version = {self.version}"):
                        db.execute(statement)
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self) -> Path:
        """Rename the files of the database, and return the new path of the first."""
        aside = set_aside(self.path)
        with suppress(FileNotFoundError):
            self._journal.rename(aside.with_name(f"{self._journal.name}{aside.name.removeprefix(self.path.name)}"))
        return aside

"""Small files that only the user can read: written whole or not at all, and never through a link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import StateDamaged, TrustUnusable
from edgellm.storage.state import private_folder, read_state
from edgellm.system import NO_LINKS, NOT_BLOCKING

LOCK_SECONDS = 10.0  # seconds to wait for another process; each holds a file for some milliseconds
MAX_BYTES = 2**20


def read_private(path: Path) -> bytes | None:
    """Return a file's bytes, None if there is no file. Remove other users' access to it.

    Raises:
        TrustUnusable: it is a link, not a plain file, too large, or cannot be read.
    """
    try:
        return read_state(path, MAX_BYTES)
    except StateDamaged as error:
        raise TrustUnusable(error.what, "Move it away, and try again.") from None


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` in one step, replacing its earlier content.

    Raises:
        TrustUnusable: the file cannot be written; its earlier content is unchanged.
    """
    temporary = path.with_name(path.name + ".new")
    with _system_errors(path, "written"):
        temporary.unlink(missing_ok=True)  # left by a crash
        try:
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS | NOT_BLOCKING, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make `folder`, closed to other users, and hold its lock against other processes until the `with` ends.

    Raises:
        TrustUnusable: the folder cannot be created, or another process holds its lock.
    """
    with _system_errors(folder, "used"):
        if os.path.lexists(folder) and not stat.S_ISDIR(folder.lstat().st_mode):
            raise TrustUnusable(f"{folder} is not a folder.", "Move it away; a new one will be created.")
        private_folder(folder)
        lock = FileLock(folder / "lock", timeout=LOCK_SECONDS, mode=0o600)
        lock.acquire(poll_interval=0.01)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _system_errors(path: Path, action: str) -> Iterator[None]:
    """Turn the system's errors into ours: `path` cannot be `action`."""
    try:
        yield
    except Timeout as error:
        raise TrustUnusable(f"{path} is in use by another process.", "Try again when it has finished.") from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrustUnusable(
            f"{path} cannot be {action}: {reason}.",
            "Check its permissions, or set EDGELLM_HOME to a folder that you own.",
        ) from error

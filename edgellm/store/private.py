"""Small files that only the user can read: written whole or not at all, and never through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import TrustUnusable

PATIENCE = 10.0  # seconds to wait for another process; each holds a file for some milliseconds
MOST_BYTES = 2**20

_HAS_MODES = os.name != "nt"  # there the user's folders are private by other means
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_private(path: Path) -> bytes | None:
    """The file's bytes, None where there is none. One that others could read is closed to them.

    Raises:
        TrustUnusable: it is a link, no plain file, too large, or cannot be read.
    """
    with _told(path, "read"):
        try:
            handle = os.open(path, os.O_RDONLY | _PLAIN)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                raise TrustUnusable(f"{path} is not what edgellm has written there.", "Move it away, and try again.")
            if _HAS_MODES and found.st_mode & 0o077:
                os.fchmod(handle, 0o600)
            return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Puts `data` in the place of whatever `path` held, in one step.

    Raises:
        TrustUnusable: it cannot be written; what was there is unchanged.
    """
    beside = path.with_name(path.name + ".new")
    with _told(path, "written"):
        beside.unlink(missing_ok=True)  # left by a crash
        try:
            handle = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _PLAIN, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes `folder`, closed to others, and keeps other processes out of what is done in the `with`.

    Raises:
        TrustUnusable: it cannot be made, or another process does not let go of it.
    """
    with _told(folder, "used"):
        with suppress(FileExistsError):
            folder.mkdir(parents=True, mode=0o700)
        mode = folder.lstat().st_mode
        if not stat.S_ISDIR(mode):
            raise TrustUnusable(f"{folder} is not a folder.", "Move it away; a new one will be made.")
        if _HAS_MODES and mode & 0o077:
            folder.chmod(0o700)
        lock = FileLock(folder / "lock", timeout=PATIENCE, mode=0o600)
        lock.acquire(poll_interval=0.01)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    """Turns what the system says into our error: `path` cannot be `done`."""
    try:
        yield
    except Timeout as error:
        raise TrustUnusable(f"{path} is in use by another process.", "Try again when that is done.") from error
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or error
        raise TrustUnusable(
            f"{path} cannot be {done}: {why}.", "Check it, or set EDGELLM_HOME to a folder of yours."
        ) from error


def private_folder(folder: Path) -> None:
    """Make `folder`, or close the one that is there to others.

    Raises:
        OSError: it cannot be made, is no folder, or belongs to another user; so does a link that stands for it.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    if _HAS_MODES:
        mine, found = os.getuid(), folder.stat()
        if found.st_uid != mine or folder.lstat().st_uid != mine:
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if found.st_mode & 0o077:
            folder.chmod(stat.S_IMODE(found.st_mode) & 0o700)

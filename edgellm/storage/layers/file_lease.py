"""Files in use: a shared lock on the file itself tells every process of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]


@contextmanager
def kept_in_use(path: Path) -> Iterator[bool]:
    """Keep `remove_unused` from removing the file until the `with` ends; yield False where there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        there = False
        with suppress(OSError):  # it may have been removed in between
            there = os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield there


def in_use(path: Path) -> bool:
    """Return whether the file is in use just now."""
    return not _unused(path, lambda: None)


def remove_unused(path: Path) -> bool:
    """Remove the file unless it is in use; return whether it is gone."""
    return _unused(path, lambda: path.unlink(missing_ok=True))


def _unused(path: Path, act: Callable[[], None]) -> bool:
    try:
        with path.open("rb") as file:
            if fcntl is None:
                file.close()
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            act()
    except FileNotFoundError:
        return True
    except OSError:  # in use, or not ours to remove
        return False
    return True

"""How fast a file that is not in memory comes from the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_BYTES = 512 * 2**20
LEAST_SECONDS, MOST_SECONDS = 0.5, 4.0
_STEP = 2**20


def cold_read(path: Path) -> tuple[float, str]:
    """Bytes/s of reading a file, and how its pages were kept out of memory.

    A large one as far as it gets in some seconds; a small one again and again, as some disks are faster for a moment.

    Raises:
        OSError: it cannot be read.
    """
    size, taken = 0, 0.0
    with path.open("rb", buffering=0) as file:
        room = memoryview(bytearray(_STEP))
        while taken < LEAST_SECONDS and size < MOST_BYTES:
            file.seek(0)
            how = _forget(file.fileno())
            began = time.perf_counter()
            while size < MOST_BYTES and (n := file.readinto(room)):
                size += n
                if time.perf_counter() - began > MOST_SECONDS:
                    break
            taken += time.perf_counter() - began
        _forget(file.fileno())
    return size / max(taken, 1e-9), f"{size / 1e6:.0f} MB read, {how}"


def forget(path: Path) -> None:
    """Drops a file's pages from memory, so far as the system lets us. Raises OSError where it cannot be opened."""
    with path.open("rb", buffering=0) as file:
        _forget(file.fileno())


def _forget(handle: int) -> str:
    """Drops a file's pages from memory, so far as the system lets us."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return "after its pages were dropped from memory"
    try:
        import fcntl

        fcntl.fcntl(handle, 48, 1)  # F_NOCACHE, on macOS
    except (ImportError, OSError):
        return "perhaps from memory: this system cannot drop a file's pages"
    return "past the cache"

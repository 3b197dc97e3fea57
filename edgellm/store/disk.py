"""How fast a file that is not in memory comes from the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_BYTES = 512 * 2**20
MOST_SECONDS = 4.0
_STEP = 2**20


def cold_read(path: Path) -> tuple[float, str]:
    """Bytes/s of reading a file from its beginning, as far as it gets in some seconds, and how its pages were kept out
    of memory.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        how = _forget(file.fileno())
        room = memoryview(bytearray(_STEP))
        size, began = 0, time.perf_counter()
        while size < MOST_BYTES and (n := file.readinto(room)):
            size += n
            if time.perf_counter() - began > MOST_SECONDS:
                break
        taken = time.perf_counter() - began
        _forget(file.fileno())
    return size / max(taken, 1e-9), f"{size / 1e6:.0f} MB read, {how}"


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

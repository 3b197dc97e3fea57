"""The speeds of the disk and of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from edgellm import system

MAX_DOUBTFUL_AGE = 600.0
"""Seconds for which measurements on a busy machine are used."""
MAX_BYTES = 512 * 2**20
MIN_SECONDS, MAX_SECONDS = 1.0, 4.0
_READ_BYTES = 4 * 2**20
_PORTION_SECONDS = 0.2  # seconds
_MEMORY_BYTES = 256 * 2**20  # bytes read at once from memory: more than a processor's caches hold
_MEMORY_READS = 5


def cold_read(path: Path) -> tuple[float, str]:
    """Return bytes/s of reading a file from disk, and a description of how cached pages were avoided. A large file is
    read for some seconds, a small one several times. The result is the median over portions, which a stall does not
    move. The first portion of each reading is left out, where there are others: many disks that have rested are faster
    for a moment than they can sustain. Raise OSError if the file cannot be read."""
    size, elapsed = 0, 0.0
    first: list[float] = []  # seconds for a byte, of portions at the beginning of a reading
    later: list[float] = []  # seconds for a byte, of the others
    with path.open("rb", buffering=0) as file:
        system.read_at_random(file.fileno())  # bytes read ahead would not be counted
        buffer = memoryview(bytearray(_READ_BYTES))
        while elapsed < MIN_SECONDS and size < MAX_BYTES:
            file.seek(0)
            how = system.drop_pages(file.fileno())
            began = portion_began = now = perf_counter()
            portion, counted = 0, first
            while size < MAX_BYTES and now - began < MAX_SECONDS and (n := file.readinto(buffer[: MAX_BYTES - size])):
                size, portion, now = size + n, portion + n, perf_counter()
                if now - portion_began >= _PORTION_SECONDS:
                    counted.append((now - portion_began) / portion)
                    portion, portion_began, counted = 0, now, later
            elapsed += perf_counter() - began
        system.drop_pages(file.fileno())
    seconds_per_byte = median(later or first or [elapsed / max(size, 1)])
    return 1.0 / max(seconds_per_byte, 1e-12), f"{size / 1e6:.0f} MB read, {how}"


def drop_page_cache(path: Path) -> None:
    """Drop a file's pages from memory, if the system permits it. Raise OSError if the file cannot be opened."""
    with path.open("rb", buffering=0) as file:
        system.drop_pages(file.fileno())


def memory_speed() -> float:
    """Return the bytes/s at which all performance cores together read memory: the best of some readings, as other
    programs only take from it."""
    threads = system.performance_cores()
    blocks = np.array_split(np.ones(_MEMORY_BYTES // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_MEMORY_READS):
            began = perf_counter()
            list(pool.map(np.max, blocks))
            seconds.append(perf_counter() - began)
    return _MEMORY_BYTES / min(seconds)

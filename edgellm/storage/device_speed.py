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
_STEP, _MAX_STEP = 2**20, 16 * 2**20  # bytes per read
_FAST_SECONDS = 0.1  # a read that takes less time is followed by a larger one
_PORTION_SECONDS = 0.2  # seconds
_MEMORY_BYTES = 256 * 2**20  # bytes read at once from memory: more than a processor's caches hold
_MEMORY_READS = 5


def cold_read(path: Path) -> tuple[float, str]:
    """Return bytes/s of reading a file from disk, and a description of how cached pages were avoided. A large file is
    read for some seconds, a small one several times. The result is the median over portions, which a stall does not
    move. The first portion of each reading is left out, where there are others: many disks that have rested are faster
    for a moment than they can sustain. Raise OSError if the file cannot be read."""
    size, elapsed, step = 0, 0.0, _STEP
    portions: list[float] = []  # seconds for a byte
    first_portions: list[float] = []  # seconds for a byte, in portions at the beginning of a file
    portion_bytes, portion_seconds, first = 0, 0.0, True  # bytes and seconds of a portion that is still too short
    with path.open("rb", buffering=0) as file:
        system.read_at_random(file.fileno())  # bytes read ahead would not be counted
        buffer = memoryview(bytearray(_MAX_STEP))
        while elapsed < MIN_SECONDS and size < MAX_BYTES:
            file.seek(0)
            how = system.drop_pages(file.fileno())
            began = now = perf_counter()
            if not first:  # otherwise an unfinished portion would go on at the beginning of the file
                portion_bytes, portion_seconds = 0, 0.0
            first = True
            while (
                size < MAX_BYTES
                and now - began < MAX_SECONDS
                and (n := file.readinto(buffer[: min(step, MAX_BYTES - size)]))
            ):
                size += n
                before, now = now, perf_counter()
                portion_bytes, portion_seconds = portion_bytes + n, portion_seconds + now - before
                if portion_seconds >= _PORTION_SECONDS:
                    (first_portions if first else portions).append(portion_seconds / portion_bytes)
                    portion_bytes, portion_seconds, first = 0, 0.0, False
                if now - before < _FAST_SECONDS:
                    step = min(2 * step, _MAX_STEP)
            elapsed += perf_counter() - began
        system.drop_pages(file.fileno())
    counted = portions or first_portions
    seconds_per_byte = median(counted) if counted else elapsed / max(size, 1)
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

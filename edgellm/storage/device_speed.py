"""Speeds that were measured here and are kept: of the disk, and of decodes of n rows."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter

from edgellm.engine.timing import BUSY, is_plausible
from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import from_json, read_json, write_state

MOST_BYTES = 512 * 2**20
LEAST_SECONDS, MOST_SECONDS = 1.0, 4.0
_STEP, _STEP_MOST = 2**20, 16 * 2**20  # bytes that are asked for at once
_QUICK = 0.1  # seconds: if they come sooner, more are asked for
_PORTION = 0.2  # seconds


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()[:100]
    return (platform.processor() or platform.machine() or "unknown")[:100]


def cold_read(path: Path) -> tuple[float, str]:
    """Return bytes/s of reading a file, and how its pages were kept out of memory.

    A large file is read for some seconds, a small one several times. The result is the median over portions, which a
    stall does not move. The first portion of each reading is left out, where there are others: many disks that have
    rested are faster for a moment than they can sustain.

    Raises:
        OSError: the file cannot be read.
    """
    size, taken, step = 0, 0.0, _STEP
    portions: list[float] = []  # seconds for a byte
    rested: list[float] = []  # the same, of portions at the beginning of a file
    some, lasted, first = 0, 0.0, True  # bytes and seconds of a portion that is still too short
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # bytes read ahead, megabytes on some systems, would not be counted
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        room = memoryview(bytearray(_STEP_MOST))
        while taken < LEAST_SECONDS and size < MOST_BYTES:
            file.seek(0)
            how = _forget(file.fileno())
            began = now = perf_counter()
            if not first:  # otherwise an unfinished portion would go on at the beginning of the file
                some, lasted = 0, 0.0
            first = True
            while (
                size < MOST_BYTES
                and now - began < MOST_SECONDS
                and (n := file.readinto(room[: min(step, MOST_BYTES - size)]))
            ):
                size += n
                before, now = now, perf_counter()
                some, lasted = some + n, lasted + now - before
                if lasted >= _PORTION:
                    (rested if first else portions).append(lasted / some)
                    some, lasted, first = 0, 0.0, False
                if now - before < _QUICK:
                    step = min(2 * step, _STEP_MOST)
            taken += perf_counter() - began
        _forget(file.fileno())
    counted = portions or rested
    pace = median(counted) if counted else taken / max(size, 1)
    return 1.0 / max(pace, 1e-12), f"{size / 1e6:.0f} MB read, {how}"


def forget(path: Path) -> None:
    """Drop a file's pages from memory, as far as the system lets us. Raises OSError where it cannot be opened."""
    with path.open("rb", buffering=0) as file:
        _forget(file.fileno())


def _forget(handle: int) -> str:
    """Drop a file's pages from memory, as far as the system lets us; return a text that says how."""
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


OLDEST = 30 * 86_400.0  # seconds
DOUBTFUL_OLDEST = 600.0
"""Seconds for which a curve is used that was measured while the machine was busy."""
CHANGE_MOST = 4.0
"""The most that a change of the number of rows may cost, in decodes of one row: llama.cpp builds its graph again."""


@dataclass(frozen=True, slots=True)
class KeptCurve:
    """A cost curve as it is kept: `seconds[i]` for a decode of `rows[i]` rows, the cost of a `change`, and the seconds
    of `heads`. It was measured at `taken` (seconds since 1970, UTC), on what `device` says, while the process waited
    for a processor for the share `waited` of its time."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    change: float
    heads: tuple[float, ...]
    taken: float
    waited: float
    device: str

    @property
    def doubtful(self) -> bool:
        """Whether the machine was busy during the measurement."""
        return self.waited > BUSY

    @property
    def sound(self) -> bool:
        """Whether these times are possible on a device."""
        rows, seconds, heads = self.rows, self.seconds, self.heads
        if not (len(rows) == len(seconds) > 0 and rows[0] == 1 and list(rows) == sorted(set(rows))):
            return False
        if not (all(0.0 < taken < inf for taken in (*seconds, *heads)) and self.change >= 0.0):
            return False
        one = seconds[0] + heads[0] if heads else seconds[0]  # a row alone is measured with its head
        return self.change <= CHANGE_MOST * one and is_plausible(rows, (one, *seconds[1:]))


def curve_path(model_hash: str, threads: int) -> Path:
    """Return the file of a curve; its name has the device in it, because several devices may share a home folder."""
    return cache_dir() / "curves" / f"{model_hash[:16]}-{threads}-{platform.node() or 'here'}.json"


def read_curve(path: Path, device: str) -> KeptCurve | None:
    """Return the curve kept for `device`; None where there is none, or it is damaged, impossible or too old."""
    try:
        kept = read_json(path, lambda found: from_json(KeptCurve, found))
    except StateDamaged:
        return None
    if kept is None:
        return None
    young = 0.0 <= time.time() - kept.taken <= (DOUBTFUL_OLDEST if kept.doubtful else OLDEST)
    return kept if young and kept.sound and kept.device == device else None


def keep_curve(path: Path, kept: KeptCurve) -> None:
    """Write a curve to disk. Where that fails, it is measured again next time."""
    with suppress(OSError):
        write_state(path, json.dumps(asdict(kept)))

"""How much memory this device has for layers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_SPARE = 0.1  # of what is free is left to others
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.max", "memory.current")


def free_memory(proc: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return the free bytes, and what bounds them: the machine's free memory, or this process's control groups."""
    free, reason = psutil.virtual_memory().available, "what this machine has free, less a tenth"
    with suppress(OSError, ValueError):
        for line in proc.read_text(encoding="utf-8").splitlines():
            _number, controllers, place = line.split(":", 2)
            if controllers in ("", "memory"):
                root, names = (mounts / "memory", _V1) if controllers else (mounts, _V2)
                left = _left(root, place, names)
                if left is not None and left < free:
                    free, reason = left, "what its control group leaves it, less a tenth"
    return int(max(0, free) * (1.0 - _SPARE)), reason


def _left(root: Path, place: str, names: tuple[str, str]) -> int | None:
    """Return the least memory that a control group or one above it leaves; None without a limit."""
    least: int | None = None
    folder = root / place.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        with suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((group / name).read_text(encoding="utf-8")) for name in names)
            least = min(limit - used, least if least is not None else limit)
    return least

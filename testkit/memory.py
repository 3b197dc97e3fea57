"""The memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def most_memory(pid: int | None = None) -> int:
    """Return the most bytes that this process, or that of the number `pid`, has had at once.

    Linux hands `ru_maxrss` down from the process that started this one, so it is read from `/proc` there.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of macOS, in bytes

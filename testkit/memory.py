"""The memory of this process, and of an index."""

import resource
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.spec.ngram.sources import SuffixAutomaton


def most_memory(pid: int | None = None) -> int:
    """Return the maximum memory, in bytes, of this process or of process `pid`.

    On Linux it is read from `/proc`, because a process inherits `ru_maxrss` from its parent.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def index_bytes(text: npt.NDArray[np.int64]) -> int:
    """Return the bytes of the index of a text."""
    tokens = text.tolist()
    tracemalloc.start()
    index = SuffixAutomaton()
    index.extend(tokens)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken

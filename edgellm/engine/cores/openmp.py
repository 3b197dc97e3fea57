"""llama.cpp, imported so that each of several threads decodes as fast as one alone would.

GNU's OpenMP keeps a team of threads for every thread that has decoded. As soon as all teams together have more threads
than there are processors, even if only one team has anything to do, it puts a waiting thread to sleep nearly at once;
llama.cpp has the threads wait for each other after every operation, and five rows of a small model took five times as
long as they need (`python -m bench.teams`). With an active waiting policy they wait ten times as long before they
sleep, which is enough. How long they spin where nothing is crowded is set to GNU's own default, which that policy would
raise to minutes.

All that is about the threads of one process. GNU's OpenMP knows nothing of other processes, whose threads take cores
away from threads that are waited for: `sharing` handles that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}


@contextmanager
def _waiting() -> Iterator[None]:
    """Set the variables while the library reads them; if the user has set any of them, leave all as they are."""
    added = {} if WAITING.keys() & os.environ.keys() else WAITING
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


with _waiting():
    from llama_cpp import llama_cpp as binding

__all__ = ["binding"]

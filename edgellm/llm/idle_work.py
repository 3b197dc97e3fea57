"""Work that runs in the background while no reply is written: hashing files, measuring decodes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from edgellm.engine.native import Stop, release_threads
from edgellm.errors import Stopped
from edgellm.storage.fingerprint import FileHash

Task: TypeAlias = Callable[[Stop], object]
"""A function that does its work, or raises Stopped soon after its argument is set; called again, it continues."""

PAUSE = 0.5  # seconds after a reply before work goes on: the next reply may follow at once
STOPPING = 0.2
"""Most seconds that a reply waits for the work to stop: sharing the cores would take longer."""
_log = logging.getLogger(__name__)


class IdleWork:
    """Tasks of a pair, run one after another in a thread of their own while no reply is being written."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._hashes: dict[Path, FileHash] = {}
        self._changed = threading.Condition()
        self._replies = 0
        self._resume_at = 0.0
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._working = False
        self._closed = False

    def add(self, task: Task) -> None:
        """Run `task` when no reply is being written. If it fails, the failure is logged, and it is not run again."""
        with self._changed:
            if self._closed:
                return
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgellm-idle", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def file_hash(self, path: Path) -> FileHash:
        """Return the hash of a file, which is computed in the background from the first call on."""
        with self._changed:
            if path not in self._hashes:
                found = self._hashes[path] = FileHash(path)
                if found.known is None:
                    self.add(found.compute)
            return self._hashes[path]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the work before the `with` block, and resume it some time after the block."""
        with self._changed:
            self._replies += 1
            self._stop.set()
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._working, STOPPING)
        try:
            yield
        finally:
            release_threads()
            with self._changed:
                self._replies -= 1
                self._resume_at = monotonic() + PAUSE
                self._changed.notify_all()

    def rest(self) -> None:
        """Begin no task for some time: a reply may follow at once."""
        with self._changed:
            self._resume_at = monotonic() + PAUSE

    def wait(self) -> None:
        """Wait until all tasks have ended."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()

    def close(self) -> None:
        """Stop the work for good, and wait until it has stopped."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._stop.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task(self._stop)
            except Stopped:
                with self._changed:
                    if not self._closed:
                        self._tasks.appendleft(task)
            except Exception as error:  # noqa: BLE001  # Replies need no background work.
                _log.warning("work in the background failed: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _next(self) -> Task | None:
        """Return the next task as soon as no reply is being written; None after the last task."""
        with self._changed:
            while self._tasks and not self._closed:
                wait = None if self._replies else self._resume_at - monotonic()
                if wait is not None and wait <= 0.0:
                    self._stop, self._working = Stop(), True
                    return self._tasks.popleft()
                self._changed.wait(wait)
            self._thread = None
            self._changed.notify_all()
            return None

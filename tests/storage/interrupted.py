"""Kills a process at every step that it takes with files and databases, and says what is there afterwards.

`python -m tests.storage.interrupted HOME` clears the history, and prints a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from edgellm.storage import History, database


class Steps:
    """Counts what this process does to files and databases, and kills it before the step `last`."""

    def __init__(self, last: int) -> None:
        self._left = last
        self._connect = sqlite3.connect

    def count(self, *_: object) -> None:
        self._left -= 1
        if self._left == -1:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(self, *args: Any, **more: Any) -> sqlite3.Connection:
        db = self._connect(*args, **more)
        db.set_trace_callback(self.count)
        return db


def killed_at(last: int) -> bool:
    """Have a process clear the history, and be killed before that step; return whether there was such a step."""
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    steps = Steps(last)
    sqlite3.connect = steps.connect  # type: ignore[assignment]
    sys.addaudithook(lambda event, _: steps.count() if event.startswith(("os.", "open", "sqlite3.")) else None)
    History().clear()
    os._exit(0)


def main(home: Path) -> None:
    database.SETTINGS += ("synchronous = OFF",)
    copy, last = home.with_name("copy"), 0
    os.environ["EDGELLM_HOME"] = str(copy)
    killed = True
    while killed:
        shutil.copytree(home, copy, symlinks=True)
        killed = killed_at(last)
        questions = [entry.question for entry in History().recent()]
        History().clear()
        left = {str(path.relative_to(copy)): path.read_bytes().decode("latin1")
                for path in sorted(copy.rglob("*")) if path.is_file()}  # fmt: skip
        sys.stdout.write(json.dumps({"killed": killed, "questions": questions, "left": left}) + "\n")
        shutil.rmtree(copy)
        last += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))

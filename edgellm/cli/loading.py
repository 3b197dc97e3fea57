"""Progress of loading a model, shown only where it takes noticeably long."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from edgellm.cli.views.console import err, is_terminal, say
from edgellm.cli.views.text import one_line

PATIENCE = 1.0  # seconds


class Loading:
    """A progress callback, for a model's name and the share of it that is loaded. Its `with` removes the bar."""

    def __init__(self, verb: str = "loading") -> None:
        """`verb` says what is done with the model."""
        self._verb = verb
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __call__(self, name: str, share: float) -> None:
        if time.monotonic() - self._began < PATIENCE:
            return
        if is_terminal(sys.stderr):
            self._bar(one_line(name), share)
        elif name not in self._told:
            self._told.add(name)
            say(f"{self._verb} {name}")

    def _bar(self, name: str, share: float) -> None:
        if self._progress is None:
            columns = (
                TextColumn(self._verb + " {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
            )
            self._progress = Progress(*columns, console=err(), transient=True)
            self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._tasks[name], completed=share)

    def __exit__(self, *_raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()

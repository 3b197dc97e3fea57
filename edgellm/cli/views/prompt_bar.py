"""What a reply waits for before its first token: a line or a bar on stderr."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.cli.views import console
from edgellm.cli.views.console import err, harmless, is_terminal, one_line, say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgellm.spec.types import PromptProgress

_READING = "reading the prompt"


@dataclass(slots=True)
class _Reader:
    """A model that reads the prompt: since when, what it had read by then, and its last report."""

    began: float
    skipped: int
    report: PromptProgress
    now: float
    task: TaskID | None = None
    told: bool = False

    @property
    def speed(self) -> float:
        """Tokens per second; 0 while not known."""
        seconds = self.now - self.began
        return (self.report.done - self.skipped) / seconds if seconds > 0.0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        return (self.report.total - self.report.done) / self.speed if self.speed > 0.0 else None

    @property
    def figures(self) -> str:
        """Tokens, speed and time left."""
        parts = [f"{self.report.done:,} of {self.report.total:,} tokens"]
        if (left := self.seconds_left) is not None:
            parts += [f"{self.speed:,.0f}/s", f"about {left:.0f} s left"]
        return ", ".join(parts)


class PromptBar:
    """Shows what a reply waits for, from `QUIET_SECONDS` on until `stop`.

    At a terminal that is a line with the time, and a bar for each model that reports how far it has read the prompt.
    Elsewhere a line is printed for each model that will take as long again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet_until = time.monotonic() + console.QUIET_SECONDS
        self._readers: dict[str, _Reader] = {}
        self._progress: Progress | None = None
        self._waiting: TaskID | None = None  # the line while no model has reported
        self._stopped = False
        self._terminal = is_terminal(sys.stderr)
        self._timer = threading.Timer(console.QUIET_SECONDS, self._show)
        self._timer.daemon = True
        if self._terminal:
            self._timer.start()

    def __call__(self, report: PromptProgress) -> None:
        """Show how far a model has read."""
        now, name = time.monotonic(), one_line(report.model)
        with self._lock:
            reader = self._readers.setdefault(name, _Reader(now, report.done, report, now))
            if report.done != reader.report.done:
                reader.report, reader.now = report, now
            if self._progress is not None:
                self._update(self._progress, name, reader)
            elif not (self._terminal or self._stopped or reader.told) and now >= self._quiet_until:
                left = reader.seconds_left
                if left is not None and left >= console.QUIET_SECONDS:
                    reader.told = True
                    say(f"{_READING} with {name}: {reader.figures}")

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._progress is None:
                say(text, style)
            else:
                self._progress.console.print(harmless(text), style=style, soft_wrap=True)

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Elapsed(TimeElapsedColumn):
            def render(self, task: Task) -> Text:
                return super().render(task) if task.total is None else Text()

        with self._lock:
            if self._stopped:
                return
            columns = TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[figures]}")
            self._progress = Progress(
                *columns, Elapsed(), console=err(), transient=True, redirect_stdout=False,
                redirect_stderr=False,
            )  # fmt: skip
            if not self._readers:
                self._waiting = self._progress.add_task(_READING, total=None, figures="")
            for name, reader in self._readers.items():
                self._update(self._progress, name, reader)
            self._progress.start()

    def _update(self, progress: Progress, name: str, reader: _Reader) -> None:
        """Show the last report of a model, with the lock held."""
        if self._waiting is not None:
            progress.remove_task(self._waiting)
            self._waiting = None
        if reader.task is None:
            reader.task = progress.add_task(f"{name} reads", figures="")
        report = reader.report
        known = report.total if report.done else None  # a bar that only moves while nothing is known
        progress.update(reader.task, total=known, completed=report.done, figures=reader.figures)

    def stop(self) -> None:
        """Remove the line; nothing is shown from now on."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

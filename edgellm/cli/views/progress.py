"""Progress on stderr: a bar at a terminal where something takes long, elsewhere a line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from edgellm.cli.views.console import err, harmless, is_terminal, one_line, say, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgellm.spec.types import PromptProgress
    from edgellm.storage import DownloadPlan, PulledModel, Transfer

QUIET_SECONDS = 1.0
"""Seconds before anything is shown."""
_READING = "reading the prompt"


class Loading:
    """A progress callback, for a model's name and the share of it that is loaded. Its `with` removes the bar."""

    def __init__(self, verb: str = "loading") -> None:
        """`verb` says what is done with the model."""
        self._verb = verb
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._printed: set[str] = set()
        self._started: dict[str, float] = {}  # times of each model's first report

    def __enter__(self) -> Self:
        return self

    def __call__(self, name: str, share: float) -> None:
        now = time.monotonic()
        self._started.setdefault(name, now)
        if now - self._began < QUIET_SECONDS:
            return
        if is_terminal(sys.stderr):
            self._bar(one_line(name), share)
        elif name not in self._printed:
            self._printed.add(name)
            left = (now - self._started[name]) * (1.0 - share) / share if share > 0.0 else 0.0
            say(f"{self._verb} {name}" + (f", about {left:.0f} s left" if round(left) else ""))

    def _bar(self, name: str, share: float) -> None:
        if self._progress is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn(self._verb + " {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
                TimeRemainingColumn(compact=True),
            )
            self._progress = Progress(*columns, console=err(), transient=True)
            self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._tasks[name], completed=share)

    def __exit__(self, *_raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()


@dataclass(slots=True)
class _Reader:
    """A model that reads the prompt: its first and its last report, with their times."""

    began: float
    skipped: int
    report: PromptProgress
    now: float
    told: bool = False

    @property
    def seconds_left(self) -> float:
        """Return the seconds that the rest takes at the speed so far; 0 while unknown."""
        return (self.report.total - self.report.done) / self._speed if self._speed else 0.0

    @property
    def _speed(self) -> float:
        """Return the tokens per second; 0 while unknown."""
        seconds = self.now - self.began
        return (self.report.done - self.skipped) / seconds if seconds > 0.0 else 0.0

    def __str__(self) -> str:
        """Return the tokens, the speed and the time left."""
        read = f"{self.report.done:,} of {self.report.total:,} tokens"
        return f"{read}, {self._speed:,.0f}/s, about {self.seconds_left:.0f} s left" if self._speed else read


class PromptBar:
    """Shows the wait for a reply's first token, from `QUIET_SECONDS` on until `stop`.

    At a terminal that is a line with the time, and a bar for each model that reports how far it has read the prompt.
    Elsewhere a line is printed for each model that will take as long again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self._readers: dict[str, _Reader] = {}
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._stopped = False
        self._timer = threading.Timer(QUIET_SECONDS, self._show)
        self._timer.daemon = True
        if is_terminal(sys.stderr):
            self._timer.start()

    def __call__(self, report: PromptProgress) -> None:
        """Show how far a model has read."""
        now, name = time.monotonic(), one_line(report.model)
        with self._lock:
            reader = self._readers.setdefault(name, _Reader(now, report.done, report, now))
            if report.done != reader.report.done:
                reader.report, reader.now = report, now
            self._update()
            quiet = self._stopped or reader.told or now < self._quiet_until or is_terminal(sys.stderr)
            if not quiet and reader.seconds_left >= QUIET_SECONDS:
                reader.told = True
                say(f"{_READING} with {name}: {reader}")

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._progress is None:
                say(text, style)
            else:
                self._progress.console.print(harmless(text), style=style, soft_wrap=True)

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._stopped:
                return
            columns = TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[figures]}")
            self._progress = Progress(
                *columns, TimeElapsedColumn(), console=err(), transient=True, redirect_stdout=False,
                redirect_stderr=False,
            )  # fmt: skip
            self._update()
            self._progress.start()

    def _update(self) -> None:
        """Show the last reports, or that there are none, with the lock held."""
        if self._progress is None:
            return
        if "" in self._tasks and self._readers:
            self._progress.remove_task(self._tasks.pop(""))
        for name in self._readers or ("",):
            if name not in self._tasks:
                described = f"{name} reads" if name else _READING
                self._tasks[name] = self._progress.add_task(described, total=None, figures="")
        for name, reader in self._readers.items():
            known = reader.report.total if reader.report.done else None  # without a report the bar pulses
            self._progress.update(self._tasks[name], total=known, completed=reader.report.done, figures=str(reader))

    def stop(self) -> None:
        """Remove the line; nothing is shown from now on."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


def download(plans: Sequence[DownloadPlan]) -> list[PulledModel]:
    """Download the models of some plans, one after the other, and show one bar over all of them on a terminal; return
    where they are."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from edgellm import storage

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"),
        DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    pulled: list[PulledModel] = []
    with Progress(*columns, console=err(), disable=not is_terminal(sys.stderr)) as progress:
        task = progress.add_task("", total=sum(plan.size for plan in plans))
        before = 0
        for plan in plans:
            progress.update(task, description=one_line(plan.file.rsplit("/", 1)[-1]))
            resumed = False

            def show(transfer: Transfer, before: int = before) -> None:
                nonlocal resumed
                if transfer.resumed and not resumed:
                    resumed = True
                    progress.console.print(f"resuming at {size(transfer.resumed)}")
                progress.update(task, completed=before + transfer.done)

            pulled.append(storage.fetch(plan, show))
            before += plan.size
            progress.update(task, completed=before)
    return pulled

"""Progress on stderr: a bar at a terminal where something takes long, elsewhere a line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from edgellm.cli.views.console import err, harmless, is_terminal, one_line, say, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgellm.mesh.deploy import DeployPart, DeployProgress
    from edgellm.spec.types import PromptProgress
    from edgellm.storage import DownloadPlan, PulledModel, Transfer

QUIET_SECONDS = 1.0
"""Seconds before anything is shown."""
_LINE_SECONDS = 5.0  # pause between two lines about an upload
_READING = "reading the prompt"


def _bars(*columns: Any, transient: bool = True, **settings: Any) -> Progress:
    from rich.progress import Progress

    return Progress(*columns, console=err(), transient=transient, **settings)


@contextmanager
def activity(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity: a spinner on a terminal, else a line each after a second."""
    began, printed = time.monotonic(), set[str]()
    if is_terminal(sys.stderr):
        with err().status(one_line(first)) as status:
            yield lambda text: status.update(one_line(text))
        return

    def update(text: str) -> None:
        if time.monotonic() - began > QUIET_SECONDS and text not in printed:
            printed.add(text)
            say(one_line(text), style="dim")

    yield update


class Loading:
    """A progress callback, for a model's name and the share of it that is loaded. Its `with` removes the bar."""

    def __init__(self, verb: str = "loading") -> None:
        """`verb` says what is done with the model."""
        self._verb, self._began = verb, time.monotonic()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}
        self._started: dict[str, float] = {}  # times of each model's first report

    def __enter__(self) -> Self:
        return self

    def __call__(self, name: str, share: float) -> None:
        now = time.monotonic()
        began = self._started.setdefault(name, now)
        if now - self._began < QUIET_SECONDS:
            return
        if is_terminal(sys.stderr):
            self._bar(name, share)
        elif name not in self._tasks:
            self._tasks[name] = None
            left = (now - began) * (1.0 - share) / share if share > 0.0 else 0.0
            say(f"{self._verb} {name}" + (f", about {left:.0f} s left" if round(left) else ""))

    def _bar(self, name: str, share: float) -> None:
        from rich.progress import BarColumn, TimeRemainingColumn

        if self._bars is None:
            percent, left = "{task.percentage:.0f}%", TimeRemainingColumn(compact=True)
            self._bars = _bars(self._verb + " {task.description}", BarColumn(), percent, left)
            self._bars.start()
        if (task := self._tasks.get(name)) is None:
            task = self._tasks[name] = self._bars.add_task(one_line(name), total=1.0)
        self._bars.update(task, completed=share)

    def __exit__(self, *_raised: object) -> None:
        if self._bars is not None:
            self._bars.stop()


@dataclass(slots=True)
class _Reader:
    """A model that reads the prompt: the time and the tokens of its first report, and its last report."""

    began: float
    skipped: int
    report: PromptProgress
    now: float
    told: bool = False

    def figures(self) -> tuple[str, float]:
        """Return the tokens, the speed and the time left for a reader, and that time in seconds; 0 while unknown."""
        read = f"{self.report.done:,} of {self.report.total:,} tokens"
        if not (self.report.done > self.skipped and self.now > self.began):
            return read, 0.0
        speed = (self.report.done - self.skipped) / (self.now - self.began)
        left = (self.report.total - self.report.done) / speed
        return f"{read}, {speed:,.0f}/s, about {left:.0f} s left", left


class PromptBar:
    """Shows the wait for a reply's first token, from `QUIET_SECONDS` on until `stop`.

    At a terminal that is a line with the time, and a bar for each model that reports how far it has read the prompt.
    Elsewhere a line is printed for each model that will take as long again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self._readers: dict[str, _Reader] = {}
        self._bars: Progress | None = None
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
            read, left = reader.figures()
            if not quiet and left >= QUIET_SECONDS:
                reader.told = True
                say(f"{_READING} with {name}: {read}")

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._bars is None:
                say(text, style)
            else:
                self._bars.console.print(harmless(text), style=style, soft_wrap=True)

    def _show(self) -> None:
        from rich.progress import BarColumn, TimeElapsedColumn

        with self._lock:
            if not self._stopped:
                columns = "{task.description}", BarColumn(10), "{task.fields[figures]}", TimeElapsedColumn()
                self._bars = _bars(*columns, redirect_stdout=False, redirect_stderr=False)
                self._update()
                self._bars.start()

    def _update(self) -> None:
        """Show the last reports, or that there are none, with the lock held."""
        if self._bars is None:
            return
        if "" in self._tasks and self._readers:
            self._bars.remove_task(self._tasks.pop(""))
        for name in self._readers or ("",):
            if name not in self._tasks:
                described = f"{name} reads" if name else _READING
                self._tasks[name] = self._bars.add_task(described, total=None, figures="")
        for name, reader in self._readers.items():
            done = reader.report.done  # without a report the bar pulses
            total = reader.report.total if done else None
            self._bars.update(self._tasks[name], total=total, completed=done, figures=reader.figures()[0])

    def stop(self) -> None:
        """Remove the line; nothing is shown from now on."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._bars is not None:
                self._bars.stop()
                self._bars = None


def download(plans: Sequence[DownloadPlan]) -> list[PulledModel]:
    """Download the models of some plans, with one bar over all of them on a terminal; return where they are."""
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from edgellm import storage

    columns = (
        "{task.description}", BarColumn(), "{task.percentage:.0f}%", DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )  # fmt: skip
    pulled: list[PulledModel] = []
    with _bars(*columns, transient=False, disable=not is_terminal(sys.stderr)) as bars:
        task = bars.add_task("", total=sum(plan.size for plan in plans))
        before, resumed = 0, set[str]()
        for plan in plans:
            bars.update(task, description=one_line(plan.file.rsplit("/", 1)[-1]))

            def notify(transfer: Transfer, before: int = before, file: str = plan.file) -> None:
                if transfer.resumed and file not in resumed:
                    resumed.add(file)
                    bars.console.print(f"resuming at {size(transfer.resumed)}")
                bars.update(task, completed=before + transfer.done)

            pulled.append(storage.fetch(plan, notify))
            before += plan.size
            bars.update(task, completed=before)
    return pulled


@contextmanager
def uploads(parts: Sequence[DeployPart]) -> Iterator[Callable[[DeployProgress], None]]:
    """Yield a function that shows the progress of a device: a bar on a terminal, else a line now and then."""
    if not is_terminal(sys.stderr):
        printed: dict[str, float] = {}

        def line(moved: DeployProgress) -> None:
            name, now = moved.part.name, time.monotonic()
            if now - printed.setdefault(name, now) >= _LINE_SECONDS and not moved.done:
                printed[name] = now
                say(f"{name}: {size(moved.arrived)} of {size(moved.total)}, {moved.activity}", style="dim")

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), "{task.fields[doing]}"
    with _bars(*columns) as bars:
        tasks = {part.name: bars.add_task(one_line(part.name), total=None, doing="") for part in parts}
        yield lambda moved: bars.update(
            tasks[moved.part.name], completed=moved.arrived, total=moved.total, doing=one_line(moved.activity)
        )

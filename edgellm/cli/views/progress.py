"""Progress on stderr: a bar at a terminal where something takes long, elsewhere a line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from edgellm.cli.views.console import err, harmless, is_terminal, one_line, say
from edgellm.errors import size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from edgellm.spec.stream import Reply
    from edgellm.spec.types import PromptProgress, Token
    from edgellm.storage.hub.pull import DownloadPlan, Transfer

QUIET_SECONDS = 1.0
"""Seconds before anything is shown."""


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


@dataclass(slots=True)
class _Work:
    """The work on a model: since when it is known, what was done by then, and the last report; what is `doing`."""

    began: float
    skipped: float
    done: float
    total: float
    unit: str
    now: float
    told: bool = False
    doing: str = ""

    def left(self) -> float:
        """Return the seconds that are left; 0 while that is unknown."""
        done = self.done - self.skipped
        return (self.total - self.done) * (self.now - self.began) / done if done > 0.0 else 0.0

    def figures(self) -> str:
        """Return what is done, of tokens with their speed, and the time that is left."""
        form: Callable[[float], str] = (lambda n: size(int(n))) if self.unit == "bytes" else "{:,.0f}".format
        unit = f" {self.unit}" * (self.unit != "bytes")
        text = f"{form(self.done)} of {form(self.total)}{unit}" if self.unit else f"{self.done:.0%}"
        if left := self.left():
            speed = f", {form((self.total - self.done) / left)}/s" if self.unit in ("tokens", "bytes") else ""
            text += f"{speed}, about {left:.0f} s left"
        return f"{text}, {self.doing}" if self.doing else text


class ProgressBar:
    """A progress callback, for the name of a model or device, and the share or units that are done. After
    `QUIET_SECONDS` a terminal shows a bar for each; elsewhere a line is printed for each that will take as long again.
    """

    def __init__(self, verb: str = "loading", unit: str = "") -> None:
        """`verb` says what is done with the model."""
        self._verb, self._unit, self._quiet_until = verb, unit, time.monotonic() + QUIET_SECONDS
        self._lock, self._stopped = threading.Lock(), False
        self._works: dict[str, _Work] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __call__(self, name: str, done: float, total: float = 1.0, doing: str = "") -> None:
        now, name = time.monotonic(), one_line(name)
        with self._lock:
            work = self._works.setdefault(name, _Work(now, done, done, total, self._unit, now))
            work.total, work.doing = total, one_line(doing)
            if done != work.done:
                work.done, work.now = done, now
            if self._stopped or now < self._quiet_until:
                return
            if is_terminal(sys.stderr):
                self._draw()
            elif not work.told and work.left() >= QUIET_SECONDS:
                work.told = True
                say(f"{self._verb} {name}: {work.figures()}")

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        with self._lock:
            if self._bars is None:
                say(text, style)
            else:
                self._bars.console.print(harmless(text), style=style, soft_wrap=True)

    def _draw(self) -> None:
        """Show a bar for each model, or one while none is known, with the lock held."""
        if self._bars is None:
            from rich.progress import BarColumn, Progress, TimeElapsedColumn

            columns = "{task.description}", BarColumn(10), "{task.fields[figures]}", TimeElapsedColumn()
            self._bars = Progress(*columns, console=err(), transient=True, redirect_stdout=False, redirect_stderr=False)
            self._bars.start()
        if "" in self._tasks and self._works:
            self._bars.remove_task(self._tasks.pop(""))
        for name in self._works or ("",):
            if name not in self._tasks:
                described = f"{self._verb} {name}" if name else self._verb.removesuffix(" with")
                self._tasks[name] = self._bars.add_task(described, total=None, figures="")
        for name, work in self._works.items():  # until something is done the bar pulses
            total = work.total if work.done else None
            self._bars.update(self._tasks[name], total=total, completed=work.done, figures=work.figures())

    def __exit__(self, *_raised: object) -> None:
        with self._lock:
            self._stopped = True
            if self._bars is not None:
                self._bars.stop()
                self._bars = None


class PromptBar(ProgressBar):
    """The wait for a reply's first token; a terminal shows the time even if no model reports how far it has read."""

    def __init__(self) -> None:
        super().__init__("reading the prompt with", "tokens")
        self._timer = threading.Timer(QUIET_SECONDS, self._show)
        self._timer.daemon = True
        if is_terminal(sys.stderr):
            self._timer.start()

    def over(self, reply: Reply) -> Iterator[Token]:
        """Yield the tokens of a reply; nothing is shown from the first one on."""
        with self:
            for token in reply:
                if not self._stopped:
                    self.__exit__()
                yield token

    def hear(self, report: PromptProgress) -> None:
        """Show how far a model has read."""
        self(report.model, report.done, report.total)

    def _show(self) -> None:
        with self._lock:
            if not self._stopped:
                self._draw()

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()
        super().__exit__(*raised)


def download(plans: Sequence[DownloadPlan]) -> list[tuple[Path, int]]:
    """Download the models of some plans; return the path of each, and the bytes that came for it."""
    resumed = set[str]()
    with ProgressBar("downloading", "bytes") as bar:

        def notify(transfer: Transfer, file: str) -> None:
            if transfer.resumed and file not in resumed:
                resumed.add(file)
                bar.say(f"resuming at {size(transfer.resumed)}")
            bar(file.rsplit("/", 1)[-1], transfer.done, transfer.total)

        return [plan.fetch(partial(notify, file=plan.file)) for plan in plans]

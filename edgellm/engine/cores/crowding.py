"""Fewer threads while other programs take the cores.

Threads that meet after every operation lose a time slice at each meeting where one of them has to wait for a core:
beside four busy programs on two cores a token of a 5.6 M model takes 4 s with two threads and 30 ms with one. Other
programs do not announce themselves. So the number of threads that the system is running decides, where it is far too
large, and otherwise the processor time of the last decodes: threads that spin while they wait should have got all of
it. Where they got less, the system tells whether they stood in line for a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GOT = 0.85
"""Share of the processor time wanted, below which other programs are looked for."""
DELAYED = 0.1
"""Share of the time wanted for which threads stood in line for a core, from which on there are other programs."""
_WINDOW = 20_000_000  # nanoseconds that are judged together: asking for the processor time takes some microseconds
_MOSTLY = 0.5  # share of a window that must be spent computing for it to be judged
_AGAIN = 100_000_000  # nanoseconds after which a lower number of threads is reconsidered
_FIRST, _LONGEST = 1_000_000_000, 60_000_000_000
"""Nanoseconds until all threads are tried again where the system says there is no room."""
_COST = 20  # the least time until the next try, in durations of the last one
OVERRUN = 2
"""Running threads for each processor, from which on one thread computes without a try."""
_LOAD = Path("/proc/loadavg")
_TASKS = Path("/proc/self/task")


def run_delay() -> int:
    """Return the nanoseconds that this process's threads have stood in line for a core; 0 where that is unknown."""
    total = 0
    with suppress(OSError):
        for task in os.listdir(_TASKS):  # noqa: PTH208
            with suppress(OSError, ValueError, IndexError):  # it has ended
                total += int((_TASKS / task / "schedstat").read_text(encoding="ascii").split()[1])
    return total


def running() -> int:
    """Return how many threads the system is running or has in line; 0 where that is unknown."""
    try:
        return int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The system's figures: nanoseconds of processor time that this process got, and stood in line for, and the number
    of running threads."""

    cpu_time: Callable[[], int] = time.process_time_ns
    run_delay: Callable[[], int] = run_delay
    running: Callable[[], int] = running
    cpus: int = os.cpu_count() or 1


class Crowding:
    """Limits the threads of one computing thread's team to those that get a core. For one thread at a time; times in
    nanoseconds."""

    __slots__ = (
        "_ask_at", "_backoff", "_before", "_began", "_cpu", "_gauges", "_limit", "_look_at",
        "_threads", "_try_at", "_wall",
    )  # fmt: skip

    def __init__(self, gauges: Gauges | None = None) -> None:
        self._gauges = gauges or Gauges()
        self._limit = 0  # 0: none
        self._look_at, self._ask_at, self._try_at, self._backoff = 0, 0, 0, _FIRST
        self._threads = self._began = self._wall = self._cpu = 0
        self._before: int | None = None  # `run_delay` when the window began, if it was asked for

    def limit(self, threads: int, now: int) -> int:
        """Return how many of `threads` threads, two or more, to use."""
        if now >= self._look_at:
            self._look(threads, now)
        return min(threads, self._limit) if self._limit else threads

    def observe(self, threads: int, wall: int, now: int) -> None:
        """Note that a computation by `threads` threads, two or more, has ended and took `wall`."""
        self._wall += wall
        elapsed = now - self._began
        if threads != self._threads:
            self._begin(threads, now, None)
        elif elapsed >= _WINDOW:
            self._begin(threads, now, self._judge(threads, elapsed, now))

    def _look(self, threads: int, now: int) -> None:
        running = self._gauges.running()
        room = 0 < running <= self._gauges.cpus - threads + 1
        self._look_at = now + _WINDOW
        if running >= OVERRUN * self._gauges.cpus:
            self._limit, self._look_at = 1, now + _AGAIN
        elif self._limit and not room and now < self._try_at:
            self._look_at = now + _AGAIN
        elif self._limit or not self._threads:
            self._limit = 0  # try them all, for a window
            self._begin(threads, now, self._gauges.run_delay())

    def _judge(self, threads: int, elapsed: int, now: int) -> int | None:
        """Set the limit by the window that ends; return `run_delay` for the next one, None where it was not needed."""
        got, before = (self._gauges.cpu_time() - self._cpu) / (threads * elapsed), self._before
        if self._wall < _MOSTLY * elapsed:
            return None
        if got >= GOT:
            self._backoff = self._backoff if self._limit else _FIRST
            return None
        if before is None and now < self._ask_at:
            return None
        after = self._gauges.run_delay()
        if before is None:
            return after
        if after - before <= DELAYED * threads * elapsed:  # they sleep: no other program is in their way
            self._ask_at = now + _FIRST
            return None
        self._limit = max(1, min(threads - 1, int(got * threads + 0.1)))
        self._look_at, self._try_at = now + _AGAIN, now + max(self._backoff, _COST * elapsed)
        self._backoff = min(2 * self._backoff, _LONGEST)
        return after

    def _begin(self, threads: int, now: int, before: int | None) -> None:
        self._threads, self._began, self._wall = threads, now, 0
        self._cpu, self._before = self._gauges.cpu_time(), before

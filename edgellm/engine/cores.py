"""Sharing the processor's cores with all threads that compute, in every process of this user and in other programs.

llama.cpp's threads meet after every operation, and the first thread spins until all have arrived. With more threads
than cores it spins while a thread that it waits for cannot run: two processes with two threads each on two cores decode
at a tenth of the speed of a process alone. So a thread that computes says so in memory that all of this user's
processes share, and uses its fair share of the cores while others compute. It holds a lock, so that the kernel itself
takes a process that was killed off the list. Without shared memory (not Linux, a single core, a folder
that another user owns) every thread uses as many cores as it would alone.

Threads that meet after every operation lose a time slice at each meeting where one of them has to wait for a core:
beside four busy programs on two cores a token of a 5.6 M model takes 4 s with two threads and 30 ms with one. Other
programs do not announce themselves. So the number of threads that the system is running decides, where it is far too
large, and otherwise the processor time of the last decodes: threads that spin while they wait should have got all of
it. Where they got less, the system tells whether they stood in line for a core.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgellm import system
from edgellm.engine import native

FOLDER = Path("/dev/shm")  # noqa: S108  memory, the same for every session of a user; our folder there is checked
SLOTS = 32
"""Threads that can be entered at once; further threads compute unseen."""
_COLUMNS = 4  # words of 64 bits for each slot
_CPU_BITS = 62  # processors in a mask; further processors share a bit
_PAUSE = 5_000_000  # most nanoseconds between two decodes of a thread that goes on
_DOUBTED = 100_000_000  # nanoseconds of a computation after which its process may have been killed or stopped


class CoreTable:
    """The threads that compute on this machine, as seen by this process. Any number of threads may use it.

    A slot in shared memory has the time in nanoseconds since which its thread computes (0: idle), how many threads it
    would use alone, its processors, and its process. Only its owner writes to it, and keeps a file of the slot locked.
    """

    def __init__(self, folder: Path, cores: int, cpus: int) -> None:
        """Use the files in `folder`; `cores` and `cpus` (a bit mask) are this process's.

        Raises:
            OSError: the folder or a file is a link, or belongs to or is open to another user; or memory is short.
        """
        self.cores, self.cpus = cores, cpus
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = os.open(folder, os.O_RDONLY | system.FOLDER | system.NO_LINKS | system.NOT_INHERITED)
        _check_private(self._folder)
        size = 8 * _COLUMNS * SLOTS
        file = self._open(f"table-{size}")
        system.reserve(file, size)  # short memory fails here rather than at a later write
        words = memoryview(mmap.mmap(file, size)).cast("q")
        os.close(file)
        self._since, self._wanted, self._cpus, self._process = (
            words[SLOTS * at : SLOTS * (at + 1)] for at in range(_COLUMNS)
        )

    def claim(self, owner: object) -> int | None:
        """Return a slot that belongs to `owner` as long as that lives; None where none is free."""
        for slot in range(SLOTS):
            file = self._open(f"thread-{slot}")
            if system.try_lock(file):
                self._since[slot] = 0
                self._cpus[slot], self._process[slot] = self.cpus, os.getpid()
                weakref.finalize(owner, os.close, file).atexit = False  # the kernel closes the file at exit
                return slot
            os.close(file)
        return None

    def begin(self, slot: int, wanted: int, now: int) -> None:
        """Say that the owner of a slot computes, and would do so with `wanted` threads alone."""
        self._wanted[slot], self._since[slot] = wanted, now

    def end(self, slot: int) -> None:
        """Say that the owner of a slot computes no longer."""
        self._since[slot] = 0

    def others(self, mine: int, now: int) -> dict[int, int]:
        """Return the slots but `mine` whose threads compute, and how many threads each would use alone."""
        found = {}
        for slot, since in enumerate(self._since.tolist()):
            if not since or slot == mine or not self._cpus[slot] & self.cpus:
                continue
            if now - since < _DOUBTED or self._computes(slot):
                found[slot] = self._wanted[slot]
        return found

    def _computes(self, slot: int) -> bool:
        """Return whether a slot's owner lives and was not stopped."""
        file = self._open(f"thread-{slot}")
        try:
            if system.try_lock(file):
                self._since[slot] = 0
                return False
            return not system.is_stopped(self._process[slot])
        finally:
            os.close(file)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | system.NO_LINKS | system.NOT_BLOCKING | system.NOT_INHERITED
        file = os.open(name, flags, 0o600, dir_fd=self._folder)
        try:
            _check_private(file)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError("not a plain file")
        except OSError:
            os.close(file)
            raise
        return file


def _check_private(file: int) -> None:
    found = os.fstat(file)
    if not system.is_mine(found) or found.st_mode & 0o077:
        raise OSError("open to others")


def fair_share(cores: int, mine: tuple[int, int], others: Sequence[tuple[int, int]]) -> int:
    """Return the cores for one of several computations, given as (threads wanted, slot): at least one.

    Max-min fair: no computation gets more than it wants, and the cores that it leaves go to the others.
    """
    left, computations = cores, sorted((mine, *others))
    for at, one in enumerate(computations):
        share = max(1, min(one[0], left // (len(computations) - at)))
        if one == mine:
            return share
        left = max(0, left - share)
    return 1


class Computation:
    """A computation of the calling thread: `with computation.of(threads) as share:` it computes with `share` threads.

    It holds a slot as long as the thread lives. Other computations count if they run when it begins, or ran when the
    last one ended a moment ago, between two decodes. A thread that waited for it, as a verifier waits for a draft, does
    not count.
    """

    __slots__ = ("__weakref__", "_began", "_crowding", "_ended", "_others", "_share", "_slot", "_table", "_threads")

    def __init__(self, table: CoreTable | None, crowding: Crowding | None = None) -> None:
        """Compute beside those in a table. Belongs to one thread."""
        slot = None if table is None else table.claim(self)
        self._table, self._slot = (None, 0) if slot is None else (table, slot)
        self._crowding = crowding or Crowding()
        self._threads = self._share = 1
        self._began = self._ended = 0
        self._others: dict[int, int] = {}  # computing slots when the last computation ended

    def of(self, threads: int) -> Self:
        """Set how many threads the next computation would use alone, and return self."""
        self._threads = threads
        return self

    def __enter__(self) -> int:
        table, slot, threads = self._table, self._slot, self._threads
        if table is None:
            return threads
        self._began = now = time.monotonic_ns()
        if threads > 1:
            others = table.others(slot, now)
            if now - self._ended < _PAUSE:
                others = self._others | others
            if others:
                wants = [(wanted, other) for other, wanted in others.items()]
                threads = min(threads, fair_share(table.cores, (threads, slot), wants))
            threads = self._crowding.limit(threads, now)
        self._share = threads
        table.begin(slot, self._threads, now)
        return threads

    def __exit__(self, *_raised: object) -> None:
        table, slot = self._table, self._slot
        if table is None:
            return
        table.end(slot)
        if self._threads > 1:
            self._ended = now = time.monotonic_ns()
            self._others = table.others(slot, now)
            if self._share > 1:
                self._crowding.observe(self._share, now - self._began, now)


@functools.cache
def core_table() -> CoreTable | None:
    """Return this process's view of the user's table; None where cores are not shared."""
    cores = native.available_threads()
    if not system.SHARES_CORES or cores < 2:
        return None
    cpus = 0
    for cpu in system.allowed_processors():
        cpus |= 1 << cpu % _CPU_BITS
    try:
        return CoreTable(FOLDER / f"edgellm-{system.user()}", cores, cpus)
    except OSError:
        return None


_thread_local = threading.local()


def computation(threads: int) -> Computation:
    """Return the calling thread's computation, which would use `threads` threads alone."""
    try:
        found: Computation = _thread_local.computation
    except AttributeError:
        found = _thread_local.computation = Computation(core_table())
    return found.of(threads)


MIN_CPU_SHARE = 0.85
"""Share of the wanted processor time below which to look for other programs."""
MIN_DELAY_SHARE = 0.1
"""Share of the wanted time that threads waited for a core, above which other programs are assumed."""
_WINDOW = 20_000_000  # nanoseconds of a window: reading the processor time takes some microseconds
_MOSTLY = 0.5  # least share of a window spent computing, to judge it
_RECHECK = 100_000_000  # nanoseconds after which a lower number of threads is reconsidered
_FIRST_RETRY, _MAX_RETRY = 1_000_000_000, 60_000_000_000
"""Nanoseconds until all threads are tried again if the system is crowded."""
_RETRY_COST = 20  # minimum time until the next try, in durations of the last one
MAX_RUNNING = 2
"""Running threads per processor above which one thread computes without a try."""


def run_delay() -> int:
    """Return the nanoseconds that this process's threads have waited for a core; 0 if unknown."""
    return sum(waited for _, waited in system.thread_times().values())


@dataclass(frozen=True, slots=True)
class Gauges:
    """Readings of the system: processor time of this process and time that its threads waited for a core, both in
    nanoseconds, and the number of running threads."""

    cpu_time: Callable[[], int] = time.process_time_ns
    run_delay: Callable[[], int] = run_delay
    running: Callable[[], int] = system.running_threads
    cpus: int = os.cpu_count() or 1


class Crowding:
    """A limit of a computation's threads to the threads that get a core. For one thread at a time; in nanoseconds."""

    __slots__ = (
        "_backoff", "_before", "_began", "_cpu", "_gauges", "_limit", "_measure_at",
        "_retry_at", "_threads", "_update_at", "_wall",
    )  # fmt: skip

    def __init__(self, gauges: Gauges | None = None) -> None:
        self._gauges = gauges or Gauges()
        self._limit = 0  # threads; 0: no limit
        self._update_at, self._measure_at, self._retry_at, self._backoff = 0, 0, 0, _FIRST_RETRY
        self._threads = self._began = self._wall = self._cpu = 0
        self._before: int | None = None  # `run_delay` when the window began, if it was asked for

    def limit(self, threads: int, now: int) -> int:
        """Return how many of `threads` threads, two or more, to use."""
        if now >= self._update_at:
            self._update_limit(threads, now)
        return min(threads, self._limit) if self._limit else threads

    def observe(self, threads: int, wall: int, now: int) -> None:
        """Record a computation by `threads` threads, two or more, that took `wall`."""
        self._wall += wall
        elapsed = now - self._began
        if threads != self._threads:
            self._begin(threads, now, None)
        elif elapsed >= _WINDOW:
            self._begin(threads, now, self._judge(threads, elapsed, now))

    def _update_limit(self, threads: int, now: int) -> None:
        running = self._gauges.running()
        has_room = 0 < running <= self._gauges.cpus - threads + 1
        self._update_at = now + _WINDOW
        if running >= MAX_RUNNING * self._gauges.cpus:
            self._limit, self._update_at = 1, now + _RECHECK
        elif self._limit and not has_room and now < self._retry_at:
            self._update_at = now + _RECHECK
        elif self._limit or not self._threads:
            self._limit = 0  # try all threads for a window
            self._begin(threads, now, self._gauges.run_delay())

    def _judge(self, threads: int, elapsed: int, now: int) -> int | None:
        """Set the limit by the window that ends; return `run_delay` for the next window, None if it was not needed."""
        got, before = (self._gauges.cpu_time() - self._cpu) / (threads * elapsed), self._before
        if self._wall < _MOSTLY * elapsed:
            return None
        if got >= MIN_CPU_SHARE:
            self._backoff = self._backoff if self._limit else _FIRST_RETRY
            return None
        if before is None and now < self._measure_at:
            return None
        after = self._gauges.run_delay()
        if before is None:
            return after
        if after - before <= MIN_DELAY_SHARE * threads * elapsed:  # threads sleep: no other program takes their cores
            self._measure_at = now + _FIRST_RETRY
            return None
        self._limit = max(1, min(threads - 1, int(got * threads + 0.1)))
        self._update_at, self._retry_at = now + _RECHECK, now + max(self._backoff, _RETRY_COST * elapsed)
        self._backoff = min(2 * self._backoff, _MAX_RETRY)
        return after

    def _begin(self, threads: int, now: int, before: int | None) -> None:
        self._threads, self._began, self._wall = threads, now, 0
        self._cpu, self._before = self._gauges.cpu_time(), before

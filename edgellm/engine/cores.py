"""Sharing the processor's cores with all threads that compute, in every process of this user and in other programs.

llama.cpp's threads meet after every operation, and the one that arrives first spins until the others are there. With
more such threads than cores it spins while the one it waits for cannot run: two processes with two threads each on two
cores decode at a tenth of the speed that one has alone (`python -m bench.engine.shared_cores`). So a thread that
computes says so in a file that all of this user's processes map, and uses its fair share of the cores while others
compute.

The file is in memory, is open to this user alone and lives until the next boot. A lock on one byte of it belongs to
each thread that is entered, so that the kernel itself takes a process that was killed off the list. Without such a file
(not Linux, a single core, a folder that another user owns) every thread uses as many cores as it would alone.

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
SLOTS = 64
"""Threads that can be entered at once; further ones compute without being seen."""
_PAUSES = 4  # remembered of each thread
_HEADER = 8  # words
_WORDS = _HEADER + SLOTS * (5 + _PAUSES)
_CLAIMING = 8 * _WORDS  # byte that is locked while a slot is taken
_TRIES = 10  # to take a slot, a millisecond apart
_DOUBTED = 100_000_000  # nanoseconds after which a computation is checked, and checked again
_GONE = 1_000_000_000  # nanoseconds after which a thread is no longer expected to compute again
_CPU_BITS = 62  # processors in a mask; beyond that several share a bit


class CoreTable:
    """The threads that compute on this machine, as seen by this process. Any number of threads may use it.

    Columns of 64-bit words, one entry per slot; only a slot's owner writes to it. A reader may see an entry half
    written: then one decode has a thread too many or too few.
    """

    def __init__(self, file: int, cores: int, cpus: int) -> None:
        """Map the table; `file` is a descriptor that stays open, `cores` and `cpus` (a bit mask) are this process's."""
        self.cores, self.cpus = cores, cpus
        self._file = file
        system.reserve(file, 8 * _WORDS)  # where memory is short, this fails rather than a later write
        self._words = memoryview(mmap.mmap(file, 8 * _WORDS)).cast("q")
        at = range(_HEADER, _WORDS, SLOTS)
        self.began, self.ended, self.wanted, self._cpus, self._pid = (self._words[i : i + SLOTS] for i in at[:5])
        self.pauses = self._words[at[5] :]
        self._process = os.getpid()
        self._owned: set[int] = set()
        self._claiming = threading.Lock()  # the kernel's locks do not keep threads of one process apart
        self._doubts: dict[int, tuple[int, int, bool]] = {}  # slot: when it began and was checked, whether it computed

    def claim(self) -> int | None:
        """Return a slot that belongs to the caller until `release`; None where no slot is free just now."""
        with self._claiming:
            for _ in range(_TRIES):
                if system.try_lock_byte(self._file, _CLAIMING):
                    try:
                        return self._claim()
                    finally:
                        system.unlock_byte(self._file, _CLAIMING)
                time.sleep(0.001)  # another process is at it
        return None

    def release(self, slot: int) -> None:
        """Give a slot back. In a forked child, which has no slots, do nothing."""
        if os.getpid() != self._process:
            return
        with self._claiming:
            self._clear(slot)
            self._owned.discard(slot)
            system.unlock_byte(self._file, slot)

    def share(self, mine: int, wanted: int, now: int) -> int:
        """Return how many of `wanted` threads the owner of slot `mine` should use for what it computes next."""
        used = max(self._words[0], mine + 1)  # another process may have taken this one for dead
        if used <= 1:
            return wanted
        began, ended = self.began[:used].tolist(), self.ended[:used].tolist()
        horizon = (ended[mine] - began[mine]) // 2
        wants = []
        for slot in range(used):
            if slot == mine or not self._cpus[slot] & self.cpus:
                continue
            if began[slot] > ended[slot]:
                computes = now - began[slot] < _DOUBTED or self._computes(slot, began[slot], now)
            else:
                waited = now - ended[slot]
                computes = waited < _GONE and self._goes_on(slot, waited, horizon)
            if computes:
                wants.append((self.wanted[slot], slot))
        return min(wanted, fair_share(self.cores, (wanted, mine), wants)) if wants else wanted

    def _goes_on(self, slot: int, waited: int, horizon: int) -> bool:
        """Return whether a thread that has `waited` will probably compute within `horizon`, by its last pauses."""
        longer = [pause for pause in self.pauses[slot * _PAUSES : (slot + 1) * _PAUSES] if pause > waited]
        return 2 * sum(pause < waited + horizon for pause in longer) > len(longer)

    def _computes(self, slot: int, began: int, now: int) -> bool:
        """Return whether a thread that began long ago still computes: its process may have been killed or stopped."""
        if slot in self._owned:
            return True
        known = self._doubts.get(slot)
        if known is None or known[0] != began or not 0 <= now - known[1] < _DOUBTED:
            known = self._doubts[slot] = began, now, self._runs(slot)
        return known[2]

    def _runs(self, slot: int) -> bool:
        with self._claiming:
            if slot not in self._owned and system.try_lock_byte(self._file, slot):  # its owner is dead
                self._clear(slot)
                system.unlock_byte(self._file, slot)
                return False
        return not system.is_stopped(self._pid[slot])  # of a process in another container only the lock is known

    def _claim(self) -> int | None:
        found, used = None, 0
        for slot in range(SLOTS):
            if slot in self._owned or not system.try_lock_byte(self._file, slot):
                used = slot + 1
            elif found is None:
                found, used = slot, slot + 1
            else:
                system.unlock_byte(self._file, slot)
        self._words[0] = used
        if found is not None:
            self._clear(found)
            self._owned.add(found)
            self._cpus[found], self._pid[found] = self.cpus, os.getpid()
        return found

    def _clear(self, slot: int) -> None:
        for column in (self.began, self.ended, self.wanted, self._cpus, self._pid):
            column[slot] = 0
        for pause in range(_PAUSES):
            self.pauses[slot * _PAUSES + pause] = 0


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

    It belongs to one thread, and holds a slot as long as the thread lives.
    """

    __slots__ = ("__weakref__", "_at", "_crowding", "_share", "_slot", "_table", "_threads")

    def __init__(self, table: CoreTable | None, crowding: Crowding | None = None) -> None:
        slot = None if table is None else table.claim()
        self._table = None if slot is None else table
        self._slot, self._at = slot or 0, 0
        self._threads = self._share = 1
        self._crowding = crowding or Crowding()
        if table is not None and slot is not None:
            weakref.finalize(self, table.release, slot).atexit = False  # then the kernel does it

    def of(self, threads: int) -> Self:
        """Set how many threads the next computation would use alone, and return self."""
        self._threads = threads
        return self

    def __enter__(self) -> int:
        table, slot, threads = self._table, self._slot, self._threads
        if table is None:
            return threads
        now = time.monotonic_ns()
        self._at = at = (self._at + 1) % _PAUSES
        table.pauses[slot * _PAUSES + at] = now - table.ended[slot]
        if threads > 1:
            threads = self._crowding.limit(table.share(slot, threads, now), now)
        self._share = threads
        table.wanted[slot] = self._threads
        table.began[slot] = now
        return threads

    def __exit__(self, *_raised: object) -> None:
        table, slot, share = self._table, self._slot, self._share
        if table is None:
            return
        table.ended[slot] = now = time.monotonic_ns()
        if share > 1:
            self._crowding.observe(share, now - table.began[slot], now)


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
        return CoreTable(_private_file(FOLDER / f"edgellm-{system.user()}"), cores, cpus)
    except (OSError, ValueError):
        return None


def _private_file(folder: Path) -> int:
    """Open the table in `folder`, which is made if need be.

    Raises OSError where the folder or the file is a link, or belongs to or is open to another user.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    at = os.open(folder, os.O_RDONLY | system.FOLDER | system.NO_LINKS | system.NOT_INHERITED)
    try:
        _check_private(at)
        flags = os.O_RDWR | os.O_CREAT | system.NO_LINKS | system.NOT_BLOCKING | system.NOT_INHERITED
        file = os.open(f"cores-{_WORDS}", flags, 0o600, dir_fd=at)  # another layout is another file
    finally:
        os.close(at)
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


_thread_local = threading.local()


def computation(threads: int) -> Computation:
    """Return the calling thread's computation, which would use `threads` threads alone."""
    try:
        found: Computation = _thread_local.computation
    except AttributeError:
        found = _thread_local.computation = Computation(core_table())
    return found.of(threads)


MIN_CPU_SHARE = 0.85
"""Share of the wanted processor time below which other programs are looked for."""
MIN_DELAY_SHARE = 0.1
"""Share of the wanted time that threads waited for a core, above which other programs are assumed."""
_WINDOW = 20_000_000  # nanoseconds of a window: reading the processor time takes some microseconds
_MOSTLY = 0.5  # share of a window that must be spent computing for it to be judged
_RECHECK = 100_000_000  # nanoseconds after which a lower number of threads is reconsidered
_FIRST_RETRY, _MAX_RETRY = 1_000_000_000, 60_000_000_000
"""Nanoseconds until all threads are tried again if the system is crowded."""
_RETRY_COST = 20  # minimum time until the next try, in durations of the last one
MAX_RUNNING = 2
"""Running threads per processor above which one thread computes without a try."""


def run_delay() -> int:
    """Return the nanoseconds that this process's threads have stood in line for a core; 0 where that is unknown."""
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
    """Limits a computation's threads to those that get a core. For one thread at a time; times in nanoseconds."""

    __slots__ = (
        "_backoff", "_before", "_began", "_cpu", "_gauges", "_limit", "_measure_at",
        "_retry_at", "_threads", "_update_at", "_wall",
    )  # fmt: skip

    def __init__(self, gauges: Gauges | None = None) -> None:
        self._gauges = gauges or Gauges()
        self._limit = 0  # 0: none
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
            self._limit = 0  # try them all, for a window
            self._begin(threads, now, self._gauges.run_delay())

    def _judge(self, threads: int, elapsed: int, now: int) -> int | None:
        """Set the limit by the window that ends; return `run_delay` for the next one, None if it was not needed."""
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
        if after - before <= MIN_DELAY_SHARE * threads * elapsed:  # they sleep: no other program takes their cores
            self._measure_at = now + _FIRST_RETRY
            return None
        self._limit = max(1, min(threads - 1, int(got * threads + 0.1)))
        self._update_at, self._retry_at = now + _RECHECK, now + max(self._backoff, _RETRY_COST * elapsed)
        self._backoff = min(2 * self._backoff, _MAX_RETRY)
        return after

    def _begin(self, threads: int, now: int, before: int | None) -> None:
        self._threads, self._began, self._wall = threads, now, 0
        self._cpu, self._before = self._gauges.cpu_time(), before

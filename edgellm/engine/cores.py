"""Sharing the processor's cores with all threads that compute, in every process of this user and in other programs.

llama.cpp's threads meet after every operation, and the first thread spins until all have arrived. With more threads
than cores it spins while a thread that it waits for cannot run: two processes with two threads each on two cores decode
at a tenth of the speed of a process alone. So a thread that computes locks a part of a file that all of this user's
processes share, as many bytes as it would use threads alone; the kernel drops the lock of a process that was killed. A
thread uses its fair share of the cores while others compute. Without such locks (not Linux, a single core, another
user's file) every thread uses as many cores as it would alone.

Threads that meet after every operation lose a time slice at each meeting where one of them has to wait for a core:
beside four busy programs on two cores a token of a 5.6 M model takes 4 s with two threads and 30 ms with one. Other
programs do not announce themselves. So the number of threads that the system is running decides, where it is far too
large, and otherwise the processor time of the last decodes: threads that spin while they wait should have got all of
it. Where they got less, the system tells whether they stood in line for a core.

Other load on a machine makes a measurement longer, never shorter. So the least of several counts; rounds go over all
that is measured, because load comes and goes; and times that are still impossibly long are cut down.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from typing import Self, TypeVar

from edgellm import system
from edgellm.engine import native

FOLDER = Path("/dev/shm")  # noqa: S108  memory, the same for every session of a user; our file there is checked
_THREAD = 2**10  # bytes of the file for each number of a thread: more than a computation has threads
_PAUSE = 5_000_000  # most nanoseconds between two decodes of a thread that goes on
_RECHECK = 100_000_000  # nanoseconds after which a thread's state, or the number of threads, is reconsidered


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores that computations share: their number, this process's `processors`, and the file with the locks."""

    cores: int
    processors: frozenset[int]
    file: Path

    def open(self) -> int:
        """Return the file, opened for one thread. Raise OSError if it is a link, or another user could lock it."""
        flags = os.O_RDWR | os.O_CREAT | system.NO_LINKS | system.NOT_BLOCKING | system.NOT_INHERITED
        file = os.open(self.file, flags, 0o600)
        found = os.fstat(file)
        if not system.is_mine(found) or found.st_mode & 0o077:
            os.close(file)
            raise OSError("open to others")
        return file

    def others(self, file: int, now: int) -> dict[int, int]:
        """Return the threads but the one that has opened `file` which compute, and how many threads each would use."""
        found = {start // _THREAD: size for start, size in system.locked_parts(file)}
        return {one: wanted for one, wanted in found.items() if _competes(one, self.processors, now // _RECHECK)}


@functools.lru_cache(maxsize=64)
def _competes(thread: int, processors: frozenset[int], _time: int) -> bool:
    """Return whether a computing thread may use one of these processors, and was not stopped."""
    return not processors.isdisjoint(system.allowed_processors(thread)) and not system.is_stopped(thread)


def fair_share(cores: int, mine: tuple[int, int], others: Sequence[tuple[int, int]]) -> int:
    """Return the cores for one of several computations, given as (threads wanted, thread): at least one.

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

    Other computations count if they run when it begins, or ran when the last one of this thread did, if that ended a
    moment ago: they may be between two decodes. A thread that waits for this one, as a verifier waits for a draft, does
    not count.
    """

    def __init__(self, shared: SharedCores) -> None:
        """Compute beside others. Belongs to one thread. Raises OSError as `SharedCores.open`."""
        self._shared, self._crowding = shared, Crowding()
        self._start = _THREAD * threading.get_native_id()
        self._threads = self._share = 1
        self._began = self._ended = 0
        self._others: dict[int, int] = {}  # computing threads when the last computation began
        self._file = shared.open()
        weakref.finalize(self, os.close, self._file).atexit = False  # the kernel closes the file at exit

    def of(self, threads: int) -> Self:
        """Set how many threads the next computation would use alone, and return self."""
        self._threads = threads
        return self

    def __enter__(self) -> int:
        shared, threads = self._shared, self._threads
        self._began = now = time.monotonic_ns()
        if threads > 1:
            before = self._others if now - self._ended < _PAUSE else {}
            self._others = shared.others(self._file, now)
            if others := before | self._others:
                wants = [(wanted, other) for other, wanted in others.items()]
                threads = min(threads, fair_share(shared.cores, (threads, self._start // _THREAD), wants))
            threads = self._crowding.limit(threads, now)
        self._share = threads
        system.lock_part(self._file, self._start, self._threads)
        return threads

    def __exit__(self, *_raised: object) -> None:
        system.unlock_part(self._file, self._start, self._threads)
        if self._threads > 1:
            self._ended = now = time.monotonic_ns()
            if self._share > 1:
                self._crowding.observe(self._share, now - self._began, now)


@functools.cache
def shared_cores() -> SharedCores | None:
    """Return the cores that this process shares; None where they are not shared."""
    cores = native.available_threads()
    if not system.SHARES_CORES or cores < 2:
        return None
    found = SharedCores(cores, system.allowed_processors(), FOLDER / f"edgellm-cores-{system.user()}")
    try:
        os.close(found.open())
    except OSError:
        return None
    return found


_thread_local = threading.local()


def computation(threads: int) -> AbstractContextManager[int]:
    """Return the calling thread's computation, which would use `threads` threads alone."""
    try:
        found: Computation | None = _thread_local.computation
    except AttributeError:
        shared = shared_cores()
        found = _thread_local.computation = None if shared is None else Computation(shared)
    return nullcontext(threads) if found is None else found.of(threads)


MIN_DELAY_SHARE = 0.15
"""Share of the wanted processor time above which other programs are assumed if threads stood in line for a core."""
_MOSTLY = 0.5  # least share of a window spent computing, to judge it
_RETRY_COST = 50  # time until all threads are tried again if the system is crowded, in durations of the last try
MAX_RUNNING = 2
"""Running threads per processor above which one thread computes without a try."""


def run_delay() -> int:
    """Return the nanoseconds that this process's threads have waited for a core; 0 if unknown."""
    return sum(waited for _, waited in system.thread_times().values())


class Crowding:
    """A limit of a computation's threads to the threads that get a core. For one thread at a time; in nanoseconds."""

    def __init__(self) -> None:
        self._limit = 0  # threads; 0: no limit
        self._check_at = self._retry_at = 0
        self._threads = self._began = self._wall = self._cpu = self._delay = 0  # the window

    def limit(self, threads: int, now: int) -> int:
        """Return how many of `threads` threads, two or more, to use."""
        if now >= self._check_at:
            self._check_at = now + _RECHECK
            running, cpus = system.running_threads(), os.cpu_count() or 1
            has_room = 0 < running <= cpus - threads + 1
            if running >= MAX_RUNNING * cpus:
                self._limit = 1
            elif self._limit and (has_room or now >= self._retry_at):
                self._limit = 0
                self._begin(threads, now)
        return min(threads, self._limit or threads)

    def observe(self, threads: int, wall: int, now: int) -> None:
        """Record a computation by `threads` threads, two or more, that took `wall`."""
        self._wall += wall
        if threads != self._threads:
            self._begin(threads, now)
        elif (elapsed := now - self._began) >= _RECHECK:
            computed, cpu, delay = self._wall, self._cpu, self._delay
            self._begin(threads, now)
            if computed >= _MOSTLY * elapsed:
                self._judge(threads, elapsed, self._cpu - cpu, self._delay - delay)

    def _judge(self, threads: int, elapsed: int, got: int, waited: int) -> None:
        """Set the limit by a window in which the process `got` processor time, and its threads `waited` for a core."""
        if waited > MIN_DELAY_SHARE * threads * elapsed:
            self._limit = max(1, min(threads - 1, int(got / elapsed + 0.1)))
            self._retry_at = self._began + _RETRY_COST * elapsed

    def _begin(self, threads: int, now: int) -> None:
        self._threads, self._began, self._wall = threads, now, 0
        self._cpu, self._delay = time.process_time_ns(), run_delay()


BUSY = 0.1
"""Share of a process's time waiting for a processor, beyond which its measurements are doubtful."""


class CpuWait:
    """The share of its time that this process waits for a processor, from the creation of this object on."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), system.thread_times()

    def share(self) -> float:
        """Return the share of the time in which threads wanted to run that they spent waiting for a processor; of all
        the time that has passed, if that is longer. Return 0 where the system does not tell."""
        now = system.thread_times()
        times = [(now[thread], self._before.get(thread, (0, 0))) for thread in now]
        ran, waited = (1e-9 * sum(after[kind] - before[kind] for after, before in times) for kind in (0, 1))
        return waited / max(ran + waited, time.perf_counter() - self._began)


AGREE = 0.1
"""Largest difference of two measurements that agree, as a share."""
DIP = 4.0
"""Largest factor by which a decode may take longer than a decode of more rows. llama.cpp computes quantised rows in
fours, and the rest one by one: 3 rows may take 3 times as long as 4."""
GROWTH = 2.0
"""Largest factor by which a decode may take longer than decodes of fewer rows that add up to it."""

K = TypeVar("K", bound=Hashable)


def minimum_times(
    measure: Callable[[K], float], keys: Sequence[K], *, rounds: int, seconds: float, at_least: int = 1,
    clock: Callable[[], float] = perf_counter, samples: dict[K, list[float]] | None = None,
) -> dict[K, float]:  # fmt: skip
    """Return the minimum measurement of each key, in the order of first measurement. `samples`: earlier measurements by
    key, to which new ones are added, also if `measure` raises an error; keys with fewer measurements come first.

    All keys are measured in turn, for `rounds` rounds at most. It ends early once the minimum of every key has been
    measured twice (see `AGREE`), and after `seconds` of `clock` if `at_least` keys were measured.
    """
    samples = {} if samples is None else samples
    began, least = clock(), min((len(samples.get(key, ())) for key in keys), default=0)
    for count in range(least + 1, least + rounds + 1):
        for key in keys:
            if len(samples.get(key, ())) >= count:
                continue
            if len(samples) >= at_least and clock() - began > seconds:
                return {key: min(taken) for key, taken in samples.items()}
            taken = measure(key)  # a stopped measurement leaves the key without
            samples.setdefault(key, []).append(taken)
        if all(map(_repeated, samples.values())):
            break
    return {key: min(taken) for key, taken in samples.items()}


def _repeated(samples: Sequence[float]) -> bool:
    return sum(one <= (1.0 + AGREE) * min(samples) for one in samples) >= 2


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the lower quartile, for samples that vary even without a disturbance, such as those of a disk or a
    network."""
    return sorted(samples)[(len(samples) - 1) // 4]


def plausible_times(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds for ascending `counts` of rows, reduced where a disturbance made them longer than on any
    device; see `DIP` and `GROWTH`. Real dips are kept."""
    found = list(seconds)
    shortest = inf
    for at in range(len(found) - 1, -1, -1):
        found[at] = min(found[at], DIP * shortest)
        shortest = min(shortest, found[at])
    for at in range(1, len(found)):
        pieces = (ceil(counts[at] / counts[less]) * found[less] for less in range(at))
        found[at] = min(found[at], GROWTH * min(pieces))
    return tuple(found)


def is_plausible(counts: Sequence[int], seconds: Sequence[float]) -> bool:
    """Return whether a device can take these seconds for ascending `counts` of rows."""
    return plausible_times(counts, seconds) == tuple(seconds)

"""Threads that compute at the same time, in this process and in others, share the cores."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from edgellm import system
from edgellm.engine import Context, ContextSpec, Model, cores
from edgellm.engine.cores import Computation, Crowding, SharedCores, fair_share, run_delay, shared_cores
from testkit.processes.busy import busy
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are shared on Linux")

CORES = 4
# another process of ours: computes from the line "begin" until the line "end"
OTHER = f"""
import pathlib, sys
from edgellm import system
from edgellm.engine.cores import Computation, SharedCores
computation = Computation(SharedCores({CORES}, system.allowed_processors(), pathlib.Path(sys.argv[1])))
print("entered", flush=True)
for line in sys.stdin:
    if line == "begin\\n":
        computation.of({CORES}).__enter__()
    else:
        computation.__exit__()
    print(line, end="", flush=True)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedCores:
    """Cores of a system where no other programs run."""
    monkeypatch.setattr(cores, "run_delay", lambda: 0)
    monkeypatch.setattr(system, "running_threads", lambda: 1)
    return SharedCores(CORES, system.allowed_processors(), tmp_path / "cores")


class Other:
    """Another process that computes when it is told to."""

    def __init__(self, shared: SharedCores) -> None:
        words = [sys.executable, "-c", OTHER, str(shared.file)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("entered")

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        self._answer(what)

    def _answer(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == expected + "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.process.kill()
        self.process.communicate()


def share_of(computation: Computation, threads: int = CORES) -> int:
    with computation.of(threads) as share:
        return share


def wait_for(mine: Computation, share: int) -> None:
    until(lambda: share_of(mine) == share)


def test_a_share_is_what_is_wanted_or_as_much_as_others_have() -> None:
    assert fair_share(8, (8, 0), [(1, 1)]) == 7  # a thread of a tiny model takes no more than it can use
    assert fair_share(8, (1, 1), [(8, 0)]) == 1
    for n in range(1, 9):
        wants = [(CORES, thread) for thread in range(n)]
        shares = [fair_share(CORES, one, [each for each in wants if each != one]) for one in wants]
        assert sum(shares) == max(CORES, n)


def test_another_process_that_computes_takes_its_share_unless_elsewhere_stopped_or_killed(shared: SharedCores) -> None:
    mine, apart = (Computation(one) for one in (shared, replace(shared, processors=frozenset({10**6}))))
    with Other(shared) as chat:
        assert share_of(mine) == CORES  # it has computed nothing
        chat.do("begin")
        assert share_of(mine) == CORES // 2
        assert share_of(mine, 1) == 1
        assert share_of(apart) == CORES
        chat.do("end")
        wait_for(mine, CORES)
        chat.do("begin")
        for number, expected in ((signal.SIGSTOP, CORES), (signal.SIGCONT, CORES // 2), (signal.SIGKILL, CORES)):
            chat.process.send_signal(number)
            wait_for(mine, expected)


def test_threads_of_one_process_share_as_well_and_leave_when_they_end(shared: SharedCores) -> None:
    mine, computes, ends = Computation(shared), threading.Event(), threading.Event()

    def run() -> None:
        theirs = Computation(shared)
        theirs.of(CORES).__enter__()
        computes.set()
        ends.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    computes.wait()
    assert share_of(mine) == CORES // 2
    ends.set()
    thread.join()
    wait_for(mine, CORES)


def test_who_computed_beside_the_last_decode_is_expected_to_go_on_for_a_moment(
    shared: SharedCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**12]
    mine, theirs = Computation(shared), Computation(shared)
    theirs._start += 2**20  # another thread's
    monkeypatch.setattr(cores, "_competes", lambda *_: True)
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    for pause, share in ((1_000_000, CORES // 2), (30_000_000, CORES)):
        theirs.of(CORES).__enter__()
        assert share_of(mine) == CORES // 2
        theirs.__exit__()  # it samples, or it waits for what is computed here
        now[0] += pause
        assert share_of(mine) == share


def open_to_all(file: Path) -> None:
    file.touch()
    file.chmod(0o666)


@pytest.mark.parametrize("spoil", [lambda file: file.symlink_to(file.with_name("precious")), open_to_all, None])
def test_a_file_others_could_lock_is_not_used(spoil: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "FOLDER", tmp_path)
    monkeypatch.setattr("edgellm.engine.native.available_threads", lambda: CORES)
    (tmp_path / "precious").touch(0o600)
    if callable(spoil):
        spoil(tmp_path / f"edgellm-cores-{os.getuid()}")
    shared_cores.cache_clear()
    try:
        assert (shared_cores() is None) is callable(spoil)
    finally:
        shared_cores.cache_clear()


def test_a_decode_beside_another_process_says_the_same_with_fewer_threads(
    verifier_model: Model, shared: SharedCores, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (np.arange(32) % 400 + 300).astype(np.int32)
    mine = Computation(shared)
    monkeypatch.setattr(cores, "computation", mine.of)
    with Other(shared) as chat, Context(verifier_model, ContextSpec(n_ctx=64, threads=2)) as context:
        alone = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.native.threads_used == context.native.threads == 2
        context.clear()
        chat.do("begin")
        monkeypatch.setattr(mine, "_shared", replace(shared, cores=2))
        beside = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.native.threads_used == 1
        for one, two in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(one, two)


MS = 1_000_000


class Machine:
    """Four processors, and a process that computes: 100 ms each time, by as many threads as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu, self.delay, self.running = 10**12, 0, 0, 1
        monkeypatch.setattr("time.process_time_ns", lambda: self.cpu)
        monkeypatch.setattr(cores, "run_delay", lambda: self.delay)
        monkeypatch.setattr(system, "running_threads", lambda: self.running)
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        self.crowding = Crowding()

    def compute(self, cores: float, in_line: float = 0.0, threads: int = 4) -> int:
        """Compute with so many `cores`, and so many threads in line for one; return how many threads did."""
        used = self.crowding.limit(threads, self.now)
        self.now += 100 * MS
        self.cpu += int(cores * 100 * MS)
        self.delay += int(min(in_line, max(0.0, used - cores)) * 100 * MS)  # fewer threads do not stand in line
        if used > 1:
            self.crowding.observe(used, 100 * MS, self.now)
        return used


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_threads_that_stand_in_line_are_fewer_until_there_is_room(machine: Machine) -> None:
    machine.running = 5
    assert [machine.compute(cores=2.5, in_line=1.5) for _ in range(2)] == [4, 4]
    assert [machine.compute(cores=2.0) for _ in range(10)] == [2] * 10
    machine.now += 5000 * MS  # then all are tried, once
    assert [machine.compute(cores=2.5, in_line=1.5) for _ in range(3)] == [4, 2, 2]
    machine.running = 1
    assert [machine.compute(cores=4.0) for _ in range(10)] == [4] * 10
    machine.running = 5
    assert [machine.compute(cores=2.5, in_line=1.5) for _ in range(4)][-1] == 2


def test_where_far_too_many_threads_run_one_computes_without_a_try(machine: Machine) -> None:
    machine.running = 8
    assert [machine.compute(cores=1.0) for _ in range(50)] == [1] * 50
    machine.running = 1
    assert machine.compute(cores=4.0) == 4


def test_threads_that_sleep_or_seldom_compute_are_not_taken_for_crowded_ones(machine: Machine) -> None:
    assert [machine.compute(cores=2.0) for _ in range(10)] == [4] * 10
    for _ in range(10):
        machine.now += 200 * MS
        assert machine.compute(cores=2.0, in_line=2.0) == 4


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who stands in line")
def test_beside_busy_processes_one_thread_decodes(verifier_model: Model) -> None:
    count, ids = len(os.sched_getaffinity(0)), np.arange(300, 364, dtype=np.int32)
    before = run_delay()
    with busy(2 * count), Context(verifier_model, ContextSpec(n_ctx=128, threads=count)) as context:

        def fewer() -> bool:
            context.decode(ids)
            context.clear()
            return context.native.threads_used < max(2, context.native.threads)

        until(fewer)
    assert run_delay() > before

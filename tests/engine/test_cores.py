"""Threads that compute at the same time, in this process and in others, share the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, cores
from edgellm.engine.cores import Computation, CoreTable, Crowding, Gauges, core_table, fair_share, run_delay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are shared on Linux")

CORES = 4
# enters a table as another process of ours: computes from the line "begin" until the line "end"
OTHER = f"""
import pathlib, sys
from edgellm.engine.cores import Computation, CoreTable
computation = Computation(CoreTable(pathlib.Path(sys.argv[1]), {CORES}, int(sys.argv[2])))
print("entered", flush=True)
for line in sys.stdin:
    if line == "begin\\n":
        computation.of(int(sys.argv[3])).__enter__()
    else:
        computation.__exit__()
    print(line, end="", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def opened(folder: Path, cpus: int = 0b1111) -> CoreTable:
    return CoreTable(folder, CORES, cpus)


def calm() -> Crowding:
    """As if no other programs ran."""
    return Crowding(Gauges(lambda: 0, lambda: 0, lambda: 1))


class Other:
    """Another process that computes when it is told to."""

    def __init__(self, folder: Path, cpus: int, threads: int) -> None:
        words = [sys.executable, "-c", OTHER, str(folder), str(cpus), str(threads)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("entered")

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        self._answer(what)

    def _answer(self, expected: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == expected + "\n"


@contextmanager
def other(folder: Path, cpus: int = 0b1111, threads: int = CORES) -> Iterator[Other]:
    started = Other(folder, cpus, threads)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def share_of(computation: Computation, threads: int = CORES) -> int:
    with computation.of(threads) as share:
        return share


def test_a_share_is_what_is_wanted_or_as_much_as_others_have() -> None:
    assert fair_share(8, (8, 0), [(1, 1)]) == 7  # a thread of a tiny model takes no more than it can use
    assert fair_share(8, (1, 1), [(8, 0)]) == 1
    assert [fair_share(4, (4, mine), [(4, slot) for slot in range(3) if slot != mine]) for mine in range(3)] == [
        1,
        1,
        2,
    ]
    assert fair_share(2, (2, 5), [(2, slot) for slot in range(5)]) == 1


@pytest.mark.parametrize("n", range(1, 9))
def test_shares_use_all_cores_and_no_more(n: int) -> None:
    wants = [(CORES, slot) for slot in range(n)]
    shares = [fair_share(CORES, one, [each for each in wants if each != one]) for one in wants]
    assert sum(shares) == max(CORES, n)


def test_another_process_that_computes_takes_its_share(folder: Path) -> None:
    mine = Computation(opened(folder), calm())
    with other(folder) as chat:
        assert share_of(mine) == CORES  # it has computed nothing
        chat.do("begin")
        assert share_of(mine) == CORES // 2
        assert share_of(mine, 1) == 1
        chat.do("end")
        share_of(mine)
        assert share_of(mine) == CORES


def test_processes_on_other_processors_share_nothing(folder: Path) -> None:
    mine = Computation(opened(folder, cpus=0b0011), calm())
    with other(folder, cpus=0b1100) as elsewhere:
        elsewhere.do("begin")
        assert share_of(mine) == CORES


def test_a_killed_process_gives_its_cores_back(folder: Path) -> None:
    table = opened(folder)
    mine = Computation(table, calm())
    with other(folder) as chat:
        chat.do("begin")
        assert share_of(mine) == CORES // 2
        chat.process.kill()
        chat.process.wait()
        waiting = time.monotonic() + 60.0
        while share_of(mine) < CORES and time.monotonic() < waiting:
            time.sleep(0.01)
        assert share_of(mine) == CORES


def test_a_stopped_process_holds_no_cores_until_it_goes_on(folder: Path) -> None:
    mine = Computation(opened(folder), calm())
    with other(folder) as chat:
        chat.do("begin")
        for number, expected in ((signal.SIGSTOP, CORES), (signal.SIGCONT, CORES // 2)):
            chat.process.send_signal(number)
            waiting = time.monotonic() + 60.0
            while share_of(mine) != expected and time.monotonic() < waiting:
                time.sleep(0.01)
            assert share_of(mine) == expected


def test_threads_of_one_process_share_as_well_and_leave_when_they_end(folder: Path) -> None:
    table = opened(folder)
    mine, computes, ends = Computation(table, calm()), threading.Event(), threading.Event()

    def run() -> None:
        with Computation(table, calm()).of(CORES):
            computes.set()
            ends.wait()

    thread = threading.Thread(target=run)
    thread.start()
    computes.wait()
    assert share_of(mine) == CORES // 2
    ends.set()
    thread.join()
    share_of(mine)
    assert share_of(mine) == CORES


def test_who_computed_when_the_last_decode_ended_is_expected_to_go_on_for_a_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, now = opened(folder), [10**12]
    mine, theirs = Computation(table, calm()), Computation(table, calm())
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    for pause, share in ((1_000_000, CORES // 2), (30_000_000, CORES)):
        theirs.of(CORES).__enter__()
        assert share_of(mine) == CORES // 2
        theirs.__exit__()  # it samples, or it waits for what is computed here
        now[0] += pause
        assert share_of(mine) == share


def test_without_a_free_slot_a_thread_computes_as_if_alone(folder: Path) -> None:
    table = opened(folder)
    others = [Computation(table, calm()) for _ in range(cores.SLOTS)]
    for one in others:
        one.of(1).__enter__()
    assert share_of(Computation(table, calm())) == CORES
    del others, one
    assert table.claim(table) is not None


def linked(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(0o700)
    folder.symlink_to(elsewhere)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def with_a_link_in_it(folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / f"table-{32 * cores.SLOTS}").symlink_to(folder.with_name("precious"))


def with_a_file_for_all(folder: Path) -> None:
    folder.mkdir(0o700)
    made = folder / f"table-{32 * cores.SLOTS}"
    made.touch()
    made.chmod(0o666)


@pytest.mark.parametrize("spoil", [linked, open_to_all, with_a_link_in_it, with_a_file_for_all, None])
def test_a_table_that_others_could_write_is_not_used(
    spoil: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "FOLDER", tmp_path)
    monkeypatch.setattr("edgellm.engine.native.available_threads", lambda: CORES)
    (tmp_path / "precious").write_bytes(b"precious")
    if callable(spoil):
        spoil(tmp_path / f"edgellm-{os.getuid()}")
    core_table.cache_clear()
    try:
        assert (core_table() is None) is callable(spoil)
    finally:
        core_table.cache_clear()
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_decode_beside_another_process_says_the_same_with_fewer_threads(
    verifier_model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (np.arange(32) % 400 + 300).astype(np.int32)
    mine = Computation(opened(folder), calm())
    monkeypatch.setattr(cores, "computation", mine.of)
    with other(folder) as chat, Context(verifier_model, ContextSpec(n_ctx=64, threads=2, exact=True)) as context:
        alone = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.native.threads_used == context.native.threads == 2
        context.clear()
        chat.do("begin")
        monkeypatch.setattr(mine._table, "cores", 2)
        beside = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.native.threads_used == 1
        for one, two in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(one, two)


MS = 1_000_000


class Machine:
    """Four processors, and a process that computes: 20 ms each time, by as many threads as it may."""

    def __init__(self) -> None:
        self.now, self.cpu, self.delay, self.running = 10**12, 0, 0, 1
        self.crowding = Crowding(Gauges(lambda: self.cpu, lambda: self.delay, lambda: self.running, cpus=4))

    def compute(self, cores: float, in_line: float = 0.0, threads: int = 4) -> int:
        """Compute with so many `cores`, and so many threads in line for one; return how many threads did."""
        used = self.crowding.limit(threads, self.now)
        self.now += 20 * MS
        self.cpu += int(cores * 20 * MS)
        self.delay += int(in_line * 20 * MS)
        if used > 1:
            self.crowding.observe(used, 20 * MS, self.now)
        return used


def test_threads_that_stand_in_line_are_fewer_until_there_is_room() -> None:
    machine = Machine()
    machine.running = 5
    assert machine.compute(cores=2.5, in_line=1.5) == 4
    assert [machine.compute(cores=2.0) for _ in range(10)] == [2] * 10
    machine.now += 1000 * MS  # then all are tried, once
    assert [machine.compute(cores=2.5, in_line=1.5) for _ in range(3)] == [4, 2, 2]
    machine.now += 1000 * MS  # and again after longer
    assert machine.compute(cores=2.0) == 2
    machine.running = 1
    machine.now += 100 * MS
    assert [machine.compute(cores=4.0) for _ in range(10)] == [4] * 10
    machine.running = 5
    assert [machine.compute(cores=2.5, in_line=1.5) for _ in range(4)][-1] == 2


def test_where_far_too_many_threads_run_one_computes_without_a_try() -> None:
    machine = Machine()
    machine.running = 8
    assert [machine.compute(cores=1.0) for _ in range(50)] == [1] * 50
    machine.running = 1
    machine.now += 100 * MS
    assert machine.compute(cores=4.0) == 4


def test_threads_that_sleep_or_seldom_compute_are_not_taken_for_crowded_ones() -> None:
    machine = Machine()
    assert [machine.compute(cores=2.0) for _ in range(10)] == [4] * 10
    for _ in range(10):
        machine.now += 40 * MS
        assert machine.compute(cores=2.0, in_line=2.0) == 4


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who stands in line")
def test_beside_busy_processes_one_thread_decodes(verifier_model: Model) -> None:
    spin = "print(flush=True)\nwhile True: pass"
    count = 2 * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        before, ids = run_delay(), np.arange(300, 364, dtype=np.int32)
        with Context(verifier_model, ContextSpec(n_ctx=128, threads=len(os.sched_getaffinity(0)))) as context:
            waiting = time.monotonic() + 60.0
            while (
                context.native.threads > 1
                and context.native.threads_used == context.native.threads
                and time.monotonic() < waiting
            ):
                context.decode(ids)
                context.clear()
            assert context.native.threads == 1 or context.native.threads_used < context.native.threads
        assert run_delay() > before
    finally:
        for process in busy:
            process.kill()
            process.communicate()

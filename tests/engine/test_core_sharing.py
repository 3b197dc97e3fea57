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

from edgellm.engine import Context, Model, cores
from edgellm.engine.cores import Computation, CoreTable, Crowding, Gauges, core_table, fair_share

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are shared on Linux")

CORES = 4
# enters a table as another process of ours: computes from the line "begin" until the line "end"
OTHER = f"""
import os, sys
from edgellm.engine.cores import Computation, CoreTable
computation = Computation(CoreTable(os.open(sys.argv[1], os.O_RDWR), {CORES}, int(sys.argv[2])))
print("entered", flush=True)
for line in sys.stdin:
    if line == "begin\\n":
        computation.of(int(sys.argv[3])).__enter__()
    else:
        computation.__exit__()
    print(line, end="", flush=True)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cores"
    path.touch(0o600)
    return path


def opened(file: Path, cpus: int = 0b1111) -> CoreTable:
    return CoreTable(os.open(file, os.O_RDWR), CORES, cpus)


def calm() -> Crowding:
    """As if no other programs ran."""
    return Crowding(Gauges(lambda: 0, lambda: 0, lambda: 1))


class Other:
    """Another process that computes when it is told to."""

    def __init__(self, file: Path, cpus: int, threads: int) -> None:
        words = [sys.executable, "-c", OTHER, str(file), str(cpus), str(threads)]
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
def other(file: Path, cpus: int = 0b1111, threads: int = CORES) -> Iterator[Other]:
    started = Other(file, cpus, threads)
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


def test_another_process_that_computes_takes_its_share(file: Path) -> None:
    mine = Computation(opened(file), calm())
    with other(file) as chat:
        assert share_of(mine) == CORES  # it has computed nothing
        chat.do("begin")
        assert share_of(mine) == CORES // 2
        assert share_of(mine, 1) == 1
        chat.do("end")
        assert share_of(mine) == CORES


def test_processes_on_other_processors_share_nothing(file: Path) -> None:
    mine = Computation(opened(file, cpus=0b0011), calm())
    with other(file, cpus=0b1100) as elsewhere:
        elsewhere.do("begin")
        assert share_of(mine) == CORES


def test_a_killed_process_gives_its_cores_back(file: Path) -> None:
    table = opened(file)
    mine = Computation(table, calm())
    with other(file) as chat:
        chat.do("begin")
        assert share_of(mine) == CORES // 2
        chat.process.kill()
        chat.process.wait()
        waiting = time.monotonic() + 60.0
        while share_of(mine) < CORES and time.monotonic() < waiting:
            time.sleep(0.01)
        assert share_of(mine) == CORES
        assert table.began[1] == 0  # its slot is free


def test_a_stopped_process_holds_no_cores_until_it_goes_on(file: Path) -> None:
    mine = Computation(opened(file), calm())
    with other(file) as chat:
        chat.do("begin")
        for number, expected in ((signal.SIGSTOP, CORES), (signal.SIGCONT, CORES // 2)):
            chat.process.send_signal(number)
            waiting = time.monotonic() + 60.0
            while share_of(mine) != expected and time.monotonic() < waiting:
                time.sleep(0.01)
            assert share_of(mine) == expected


def test_threads_of_one_process_share_as_well_and_leave_when_they_end(file: Path) -> None:
    table = opened(file)
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
    assert share_of(mine) == CORES
    assert table.claim() == 1  # the slot is free again


def test_who_pauses_shortly_is_waited_for_and_who_pauses_long_is_not(file: Path) -> None:
    table = opened(file)
    mine, ms = table.claim(), 1_000_000
    theirs = table.claim()
    assert (mine, theirs) == (0, 1)
    now = 10**12
    table.began[0], table.ended[0] = now - 20 * ms, now - 6 * ms  # 14 ms for a token
    table.began[1], table.ended[1], table.wanted[1] = now - 15 * ms, now - ms, CORES
    for at in range(4, 8):
        table.pauses[at] = 2 * ms  # it samples, and goes on
    assert table.share(0, CORES, now) == CORES // 2
    for at in range(4, 8):
        table.pauses[at] = 30 * ms  # it waits for what is computed here
    assert table.share(0, CORES, now) == CORES


def test_without_a_free_slot_a_thread_computes_as_if_alone(file: Path) -> None:
    table = opened(file)
    assert [table.claim() for _ in range(cores.SLOTS)] == list(range(cores.SLOTS))
    with Computation(table, calm()).of(CORES) as share:
        assert share == CORES


def linked(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(0o700)
    folder.symlink_to(elsewhere)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def with_a_link_in_it(folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / f"cores-{cores._WORDS}").symlink_to(folder.with_name("precious"))


def with_a_file_for_all(folder: Path) -> None:
    folder.mkdir(0o700)
    made = folder / f"cores-{cores._WORDS}"
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
    verifier_model: Model, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (np.arange(32) % 400 + 300).astype(np.int32)
    mine = Computation(opened(file), calm())
    monkeypatch.setattr(cores, "computation", mine.of)
    with other(file) as chat, Context(verifier_model, n_ctx=64, threads=2, exact=True) as context:
        alone = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.threads_used == context.threads == 2
        context.clear()
        chat.do("begin")
        monkeypatch.setattr(mine._table, "cores", 2)
        beside = [context.decode(ids, outputs=3).copy(), context.decode(ids[:1]).copy()]
        assert context.threads_used == 1
        for one, two in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_thread_whose_slot_was_taken_for_free_goes_on(file: Path) -> None:
    table = opened(file)
    slots = [table.claim() for _ in range(3)]
    assert None not in slots
    other = opened(file)
    other._words[0] = 2  # as another process leaves it that takes the others for dead
    assert table.share(slots[2] or 0, 4, time.monotonic_ns()) >= 1

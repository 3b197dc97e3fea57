"""Beside other programs that take the cores, fewer threads decode."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.cores import Crowding, Gauges, run_delay

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

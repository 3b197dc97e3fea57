"""Processes that are killed or stopped while they hold cores, and programs that take all cores."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.cores import SLOTS, Computation, CoreTable, Crowding, Gauges
from edgellm.storage import resolve

CORES = 4
PATIENCE = 30.0  # seconds until a share must be right again, on a busy machine, too
SLOW = 1.0  # seconds that a token of the bundled verifier must not exceed
_COMPUTE = f"""
import pathlib, sys
from edgellm.engine.cores import Computation, CoreTable
computation = Computation(CoreTable(pathlib.Path(sys.argv[1]), {CORES}, 0xF))
with computation.of({CORES}):
    print(flush=True)
    sys.stdin.read()
"""


def killed(quick: bool) -> Found:
    """Kill or stop computing processes at random; afterwards all cores must be free again."""
    draw, wrong, trials = random.Random(18), [], 5 if quick else 50
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cores")
        table = CoreTable(path, CORES, 0xF)
        mine = Computation(table, Crowding(Gauges(lambda: 0, lambda: 0, lambda: 1)))  # ignores other programs
        for trial in range(trials):
            others = [_started(path) for _ in range(draw.randint(1, 4))]
            if _share(mine) > CORES // 2:
                wrong.append(f"trial {trial}: {len(others)} processes that compute were not seen")
            hit = signal.SIGSTOP if draw.random() < 0.3 else signal.SIGKILL
            for other in others:
                other.send_signal(hit)
            began = time.monotonic()
            while _share(mine) < CORES and time.monotonic() - began < PATIENCE:
                time.sleep(0.01)
            slowest = max(slowest, time.monotonic() - began)
            if _share(mine) < CORES:
                wrong.append(f"trial {trial}: {hit.name} kept cores of {len(others)} processes")
            for other in others:
                other.kill()
                other.communicate()
        if lost := table.others(SLOTS, time.monotonic_ns()):
            wrong.append(f"{len(lost)} slots of dead processes are lost")
    return Found(trials, tuple(wrong), {"slowest_seconds": slowest})


def busy(quick: bool) -> Found:
    """Decode beside busy programs, two for each processor; no token may take long."""
    spin = "print(flush=True)\nwhile True: pass"
    programs = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1))
    ]
    ids, taken = np.arange(300, 364, dtype=np.int32), []
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        with Model.load(resolve("edgellm-verifier")) as model, Context(model, ContextSpec(n_ctx=128)) as context:
            context.decode(ids)
            for _ in range(20 if quick else 200):
                began = time.perf_counter()
                context.decode(ids[:1])
                taken.append(time.perf_counter() - began)
                context.rollback(len(ids))
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    slow = [f"a token took {seconds:.1f} s" for seconds in taken if seconds > SLOW]
    return Found(len(taken), tuple(slow), {"median_ms": 1e3 * median(taken), "slowest_ms": 1e3 * max(taken)})


def _started(path: Path) -> subprocess.Popen[str]:
    other = subprocess.Popen(
        [sys.executable, "-c", _COMPUTE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    return other


def _share(mine: Computation) -> int:
    with mine.of(CORES) as share:
        return share


ATTACKS = (
    Attack("cores-held", "processes killed and stopped while they compute: do others get their cores?", killed),
    Attack("cores-busy", "busy programs on every processor while a model decodes: is any token late?", busy),
)

"""Processes that are killed, stopped or started in numbers while they hold cores that others wait for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.attack.harness import Attack, Found
from edgellm.engine.core_sharing import SLOTS, Computation, CoreTable

CORES = 4
PATIENCE = 30.0  # seconds until a share must be right again; a busy machine needs some
_COMPUTE = f"""
import os, sys
from edgellm.engine.core_sharing import Computation, CoreTable
computation = Computation(CoreTable(os.open(sys.argv[1], os.O_RDWR), {CORES}, 0xF))
with computation.of({CORES}):
    print(flush=True)
    sys.stdin.read()
"""


def killed(quick: bool) -> Found:
    """Kill or stop computing processes at random; afterwards all cores must be everybody's again."""
    draw, wrong, trials = random.Random(18), [], 5 if quick else 50
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cores")
        path.touch(0o600)
        table = CoreTable(os.open(path, os.O_RDWR), CORES, 0xF)
        mine = Computation(table)
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
        taken = list(iter(table.claim, None))
        if len(taken) != SLOTS - 1:
            wrong.append(f"{SLOTS - 1 - len(taken)} slots of dead processes are lost")
    return Found(trials, tuple(wrong), {"slowest_seconds": slowest})


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
    Attack("cores-held", "processes killed and stopped while they compute: do others get their cores back?", killed),
)

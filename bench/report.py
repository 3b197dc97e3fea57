"""What every benchmark shares: the machine, repeated alternating runs, and results on disk."""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor's name, the cores this process may use, the system and Python."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": name, "cores": cores, "system": platform.system(), "python": platform.python_version()}


def command(module: str) -> str:
    """The command that repeats this run."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(name: str, module: str, figures: Mapping[str, Any], seed: int | None = None) -> Path:
    """Writes `bench/results/NAME.json` with the machine, the seed and the command, and returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"command": command(module), "seed": seed, "machine": machine(), **figures}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum of repeated measurements."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else (ordered[0],) * 3
    return {"min": ordered[0], "q1": low, "median": middle, "q3": high, "max": ordered[-1]}


def most_memory() -> int:
    """Bytes that this process has had at once. (Linux hands `ru_maxrss` down from the process that started it.)"""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
        return int(lines["VmHWM"].split()[0]) * 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of macOS, in bytes


def alternate(repeats: int, *runs: Callable[[], float]) -> list[list[float]]:
    """Calls the runs in turn, `repeats` times; the order turns round each time, so that drift hits all alike."""
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(repeats):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for at in order:
            taken[at].append(runs[at]())
    return taken

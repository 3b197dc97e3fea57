"""Results of benchmarks on disk, with the machine, the seed and the command that repeats the run."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testkit import ROOT

RESULTS = ROOT / "bench" / "results"

Plot = Callable[[dict[str, Any], Path], Path | None]
"""Plots a result into a file and returns its path; None where matplotlib is missing."""


def machine() -> dict[str, Any]:
    """Return the processor's name, the cores that this process may use, the system and Python's version."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": name, "cores": cores, "system": platform.system(), "python": platform.python_version()}


def command(module: str) -> str:
    """Return the command that repeats this run."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def place(module: str, name: str) -> Path:
    """Return the file of the result `name` of a benchmark, `bench/results/PACKAGE/NAME.json`.

    `module` is the benchmark's, `bench.PACKAGE.MODULE`.
    """
    return RESULTS / module.split(".")[1] / f"{name}.json"


def read(module: str, name: str) -> dict[str, Any]:
    """Return a stored result. Raise FileNotFoundError if there is none."""
    found: dict[str, Any] = json.loads(place(module, name).read_text(encoding="utf-8"))
    return found


def write(
    name: str, module: str, figures: Mapping[str, Any], seed: int | None = None, plot: Plot | None = None
) -> Path:
    """Write a result, and next to it its picture if `plot` is given and matplotlib is installed; return its path."""
    path = place(module, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": command(module), "seed": seed, "machine": machine(), **figures}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        plot(record, path.with_suffix(".png"))
    return path

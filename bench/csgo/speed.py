"""Measure how long the planner takes against K devices and L layers, on random fleets of nine families.

Processor time of one thread, with the first call in the process; layers are computed as they are loaded. A run that
reaches the limit ends with the best plan so far and a proved gap, and counts with the time it took. Algorithm 1 as
printed is measured where it takes seconds, not hours.

Columns: K and L; seconds at the median, the 90th percentile and the maximum; the share that was planned within a
second; the share of plans that are proved; and the worst gap of the others.
"""

import statistics
from time import process_time
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.problem import Task
from testkit.algorithm1 import algorithm1
from testkit.random_fleets import FAMILIES, drawn

SIZES = ((4, 40), (8, 40), (8, 100), (12, 40), (12, 100), (16, 100), (20, 40))
REFERENCE = ((4, 40), (6, 40), (8, 40))


def taken(task: Task, limit: float) -> tuple[float, float]:
    """Return the seconds for one plan, and its gap."""
    began = process_time()
    found = fastest_first_token(task, lambda: process_time() - began > limit)
    return process_time() - began, 1.0 if found is None else found.gap


def measured(k: int, layers: int, count: int, limit: float, seed: int) -> dict[str, Any]:
    families, every = {}, []
    for family in FAMILIES:
        tasks = [
            drawn(family, np.random.default_rng([seed, k, layers, at]), k, layers, "streamed") for at in range(count)
        ]
        runs = [taken(task, limit) for task in tasks]
        every += runs
        families[family] = {"seconds": [seconds for seconds, _ in runs], "gap": max(gap for _, gap in runs)}
    times = sorted(seconds for seconds, _ in every)
    return {
        "devices": k, "layers": layers, "median": statistics.median(times), "p90": times[int(0.9 * (len(times) - 1))],
        "max": times[-1], "under_1_s": statistics.fmean(seconds < 1.0 for seconds in times),
        "proved": statistics.fmean(gap == 0.0 for _, gap in every), "worst_gap": max(gap for _, gap in every),
        "families": families,
    }  # fmt: skip


def reference(k: int, layers: int, seed: int) -> dict[str, Any]:
    """Return Algorithm 1's time on one fleet; it is the same for all."""
    task = drawn("wide", np.random.default_rng([seed, k, layers]), k, layers, "streamed")
    began = process_time()
    algorithm1(task)
    return {"devices": k, "layers": layers, "seconds": process_time() - began}


def table(found: dict[str, Any]) -> str:
    """Return a line for each number of devices and layers, and the families of the largest."""
    lines = [f"{'K':>3}{'L':>5}{'median':>10}{'p90':>9}{'max':>9}{'under 1 s':>11}{'proved':>8}{'worst gap':>11}"]
    lines += [
        f"{row['devices']:>3}{row['layers']:>5}{row['median']:>8.3f} s{row['p90']:>7.2f} s{row['max']:>7.2f} s"
        f"{row['under_1_s']:>11.0%}{row['proved']:>8.0%}{row['worst_gap']:>11.2%}"
        for row in found["sizes"]
    ]
    largest = found["sizes"][-1]
    lines.append(f"\nat K = {largest['devices']}, L = {largest['layers']}, by family: median, and the worst gap")
    lines += [
        f"  {family:<22}{statistics.median(row['seconds']):>8.3f} s{row['gap']:>9.2%}"
        for family, row in largest["families"].items()
    ]
    paper = ", ".join(f"K {row['devices']}, L {row['layers']}: {row['seconds']:.2f} s" for row in found["algorithm_1"])
    return "\n".join([*lines, f"Algorithm 1 (numpy): {paper}"]) + "\n"


def measure(
    instances: Annotated[int, "of each family and size"] = 3,
    limit: Annotated[float, "seconds for a plan"] = 5.0,
    seed: int = 0,
) -> Figures:
    """Return the times of all sizes, and of Algorithm 1."""
    return {
        "instances": instances, "limit_seconds": limit,
        "sizes": [measured(*size, instances, limit, seed) for size in track(SIZES, "sizes")],
        "algorithm_1": [reference(*size, seed) for size in track(REFERENCE, "Algorithm 1")],
    }  # fmt: skip

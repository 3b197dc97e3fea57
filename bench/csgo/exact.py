"""Compare the fast planner with Algorithm 1 on random fleets of nine families, and measure the gain of planning.

Each family has `instances` fleets of 2 to 6 devices and up to 24 layers, a third of them with each timing model.

Columns: fleets; how many `differ` in T; how many plans were `unproved`; then the average saving against an even split,
a split by strength, and the best single device, with the share of fleets on which that fits at all.
"""

import statistics
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.problem import OVERLAPS, Task, best_single, even, heuristic, makespan
from testkit.algorithm1 import algorithm1
from testkit.random_fleets import FAMILIES, SAME, drawn


def compared(family: str, count: int, seed: int) -> dict[str, Any]:
    """Return for one family how many plans differ or are unproved, and the gains."""
    wrong = unproved = 0
    saved: dict[str, list[float]] = {"even": [], "heuristic": [], "best_single": []}
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        k = int(rng.integers(2, 7))
        task = drawn(family, rng, k, int(rng.integers(k, 25)), OVERLAPS[number % len(OVERLAPS)])
        found, reference = fastest_first_token(task), algorithm1(task)
        if found is None or reference is None:
            wrong += (found is None) != (reference is None)
            continue
        wrong += abs(found.seconds / reference[0] - 1.0) > SAME
        unproved += not found.optimal
        for name, seconds in _baselines(task).items():
            saved[name].append(1.0 - found.seconds / seconds)
    gains = {
        name: {"fits": len(values) / count, "mean": statistics.fmean(values) if values else None}
        for name, values in saved.items()
    }
    return {"instances": count, "wrong": wrong, "unproved": unproved, "saved": gains}


def _baselines(task: Task) -> dict[str, float]:
    speed, disk = 1.0 / task.compute[:, 0], 1.0 / task.load[:, 0]
    cuts = {"even": even(speed, task), "heuristic": heuristic(speed, disk, task), "best_single": best_single(task)}
    return {name: makespan(task, cut) for name, cut in cuts.items() if cut is not None}


def table(found: dict[str, Any]) -> str:
    """Return a line for each family of fleets."""
    lines = [
        f"{'family':<22}{'fleets':>8}{'differ':>8}{'unproved':>10}{'even':>16}{'by strength':>16}{'best single':>16}"
    ]
    for family, line in found["families"].items():
        cells = "".join(f"{_gain(line['saved'][name]):>16}" for name in ("even", "heuristic", "best_single"))
        lines.append(f"{family:<22}{line['instances']:>8}{line['wrong']:>8}{line['unproved']:>10}{cells}")
    return "\n".join([*lines, "saved by the plan on average, and share of fleets on which the other split fits"]) + "\n"


def _gain(gain: dict[str, Any]) -> str:
    return "fits none" if gain["mean"] is None else f"{gain['mean']:.0%} ({gain['fits']:.0%})"


def measure(instances: Annotated[int, "fleets of each family"] = 1000, seed: int = 0) -> Figures:
    """Return the figures of all families."""
    families = {family: compared(family, instances, seed) for family in track(FAMILIES, "families")}
    return {"instances": instances, "families": families}

"""Measure how far each policy of switching graphs is from the optimal plan (CoordGen, 3.2).

CoordGen loads a block's decode graph while other blocks still prefill, and plans that greedily. Random instances have 2
to 4 blocks and 1 to 3 chunks, times that differ from block to block by up to three times, and loads of a third to six
computations. They are grouped by the slowdown, the average factor by which decode graphs take longer for a chunk; it is
the cost of an early switch. Then come the instances that Appendix A derives from number partitioning, and two examples
as Gantt charts, the first of them Fig. 8. No model runs; figures depend on the seed alone, except `planning_ms`, the
processor time of a plan.

Each cell has the mean and the greatest distance from the optimum, in percent; a star means that every plan was optimal.
Columns: `synchronous` loads everything after the prefill; `naive` loads each block after its last chunk; `progressive`
is the paper's greedy, from the first computation on; `unhurried` is the same greedy, begun at the best computation.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from time import process_time
from typing import Annotated, Any

from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.coldstart.graph_switching import Instance, latency, simulate
from testkit.switching_instances import EXAMPLES, POLICIES, drawn, optimum, partition

SLOWDOWNS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)


def measured(instances: Sequence[Instance]) -> dict[str, dict[str, float]]:
    """Return for each policy by which share it takes longer than the optimum: mean and spread over the instances."""
    lows = [best_latency(instance) for instance in instances]
    found = {}
    for name, policy in POLICIES.items():
        began = process_time()
        plans = [policy(instance) for instance in instances]
        cost = 1e3 * (process_time() - began) / len(instances)
        gaps = [latency(instance, plan) / low - 1.0 for instance, plan, low in zip(instances, plans, lows, strict=True)]
        best = statistics.fmean(gap < 1e-9 for gap in gaps)
        found[name] = {"mean": statistics.fmean(gaps), **spread(gaps), "best": best, "planning_ms": cost}
    return found


def example(title: str, instance: Instance, names: Sequence[str]) -> dict[str, Any]:
    """Return the timelines of an instance for a Gantt chart."""
    rows = {}
    for name in names:
        timeline = simulate(instance, POLICIES[name](instance))
        rows[name] = {"latency": timeline.latency, **dataclasses.asdict(timeline)}
    least = best_latency(instance)
    return {"title": title, "instance": dataclasses.asdict(instance), "optimum": least, "ways": rows}


def random_instances(count: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each slowdown, over `count` random instances."""
    rng = random.Random(seed)
    rows = []
    for slowdown in SLOWDOWNS:
        some = [drawn(rng, rng.randint(2, 4), rng.randint(1, 3), slowdown) for _ in range(count)]
        rows.append({"slowdown": slowdown, "ways": measured(some)})
    return rows


def best_latency(instance: Instance) -> float:
    return latency(instance, optimum(instance))


HEAD = f"{'above the optimum, %':<26}" + "".join(f"{name:>18}" for name in POLICIES)


def table(found: dict[str, Any]) -> str:
    """Return a line for each group of instances, with a column for each policy."""
    rows = [(f"slowdown {row['slowdown']:.2f}", row["ways"]) for row in found["slowdowns"]]
    rows.append(("partition (Appendix A)", found["partition"]))
    lines = [HEAD, *(_line(name, policies) for name, policies in rows)]
    return "\n".join([*lines, "mean, most; * where every plan is the best one"]) + "\n"


def _line(name: str, policies: dict[str, dict[str, float]]) -> str:
    cells = [
        f"{100 * policy['mean']:>9.2f}, {100 * policy['max']:>5.1f}{'*' if policy['best'] == 1.0 else ' '}"
        for policy in policies.values()
    ]
    return f"{name:<26}" + "".join(f"{cell:>18}" for cell in cells)


def measure(instances: Annotated[int, "of each slowdown"] = 60, seed: int = 0) -> Figures:
    """Return how far each policy is from the optimum."""
    rng = random.Random(seed)
    hard = [partition([rng.randint(1, 12) for _ in range(3)]) for _ in range(instances // 2)]
    return {
        "instances": instances, "slowdowns": random_instances(instances, seed), "partition": measured(hard),
        "examples": [example(*one) for one in EXAMPLES],
    }  # fmt: skip

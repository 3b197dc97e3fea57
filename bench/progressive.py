"""Progressive graph scheduling: how far each way of switching is from the best plan there is (CoordGen, 3.2).

    python -m bench.progressive [--instances 60] [--seed 0]

Random instances of 3 to 7 blocks and 1 to 5 chunks, with times that differ from block to block by up to three times and
loads of a third to six computations. They are grouped by the decode graphs' slowdown: how much longer they take for a
chunk, on average, which is what an early switch costs. Then the instances that Appendix A makes of number partitioning;
larger ones, against a latency that no plan can undercut; and the example of Fig. 8, as a Gantt picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

from bench.figures import FIGURES
from bench.report import RESULTS, spread, write
from edgellm.coldstart.graph_switching import (
    Instance,
    Plan,
    beam,
    floor,
    latency,
    naive,
    optimum,
    progressive,
    simulate,
    synchronous,
    unhurried,
)

Way = Callable[[Instance], tuple[Plan, str]]

WAYS: dict[str, Way] = {
    "synchronous": synchronous,
    "naive": naive,
    "progressive": progressive,
    "unhurried": unhurried,
    "beam": beam,
}
SLOWDOWNS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
LARGE = (12, 6)
EXAMPLES = (
    (
        "Four blocks, two chunks, decode graphs 25 % slower (Fig. 8)",
        Instance((2.0,) * 4, (2.5,) * 4, (4.0,) * 4, chunks=2),
        ("synchronous", "naive", "progressive"),
    ),
    (
        "Four blocks, three chunks, decode graphs half as fast",
        Instance((2.0,) * 4, (4.0,) * 4, (4.0,) * 4, chunks=3),
        ("naive", "progressive", "beam"),
    ),
)


def drawn(rng: random.Random, blocks: int, chunks: int, slowdown: float) -> Instance:
    """A random instance; its decode graphs take `slowdown` times as long as the others, on average."""
    prefill = [rng.uniform(0.5, 1.5) for _ in range(blocks)]
    decode = [seconds * (1.0 + (slowdown - 1.0) * rng.uniform(0.5, 1.5)) for seconds in prefill]
    scale = 2.0 ** rng.uniform(-1.5, 2.5)
    load = [scale * rng.uniform(0.5, 1.5) for _ in range(blocks)]
    return Instance(tuple(prefill), tuple(decode), tuple(load), chunks)


def partition(items: Sequence[int]) -> Instance:
    """The instance that Appendix A makes of whole numbers: to halve their sum is to hide every load.

    A block for each number, which is the time of its load, and a long one behind them, which takes half the sum and
    loads in no time; two chunks. Their symbols are lost, so this is how it must be: the decode graphs are as fast as
    the others, and the short blocks so fast that all their computations hide less than half a unit. All times are whole
    numbers. The optimum is the time of a bare prefill if the numbers can be halved, and more if not.
    """
    unit = 8 * len(items)
    compute = (*[1.0] * len(items), sum(items) * unit / 2)
    return Instance(compute, compute, (*(float(unit * item) for item in items), 0.0), chunks=2)


def measured(instances: Sequence[Instance], least: Callable[[Instance], float]) -> dict[str, dict[str, float]]:
    """For each way, how much longer it takes than the `least`, as a share: mean and spread over the instances."""
    lows = [least(instance) for instance in instances]
    ways = {}
    for name, way in WAYS.items():
        began = process_time()
        plans = [way(instance)[0] for instance in instances]
        cost = 1e3 * (process_time() - began) / len(instances)
        gaps = [latency(instance, plan) / low - 1.0 for instance, plan, low in zip(instances, plans, lows, strict=True)]
        best = statistics.fmean(gap < 1e-9 for gap in gaps)
        ways[name] = {"mean": statistics.fmean(gaps), **spread(gaps), "best": best, "planning_ms": cost}
    return ways


def example(title: str, instance: Instance, names: Sequence[str]) -> dict[str, Any]:
    """The timelines of an instance, as a Gantt picture needs them."""
    rows = {}
    for name in names:
        plan, reason = WAYS[name](instance)
        timeline = simulate(instance, plan)
        rows[name] = {"reason": reason, "latency": timeline.latency, **dataclasses.asdict(timeline)}
    least = best_latency(instance)
    return {"title": title, "instance": dataclasses.asdict(instance), "optimum": least, "ways": rows}


def random_instances(count: int, seed: int) -> list[dict[str, Any]]:
    """A row a slowdown."""
    rng = random.Random(seed)
    rows = []
    for slowdown in SLOWDOWNS:
        some = [drawn(rng, rng.randint(3, 7), rng.randint(1, 5), slowdown) for _ in range(count)]
        rows.append({"slowdown": slowdown, "ways": measured(some, best_latency)})
    return rows


def best_latency(instance: Instance) -> float:
    return latency(instance, optimum(instance)[0])


HEAD = f"{'above the optimum, %':<26}" + "".join(f"{name:>18}" for name in WAYS)


def table(found: dict[str, Any]) -> str:
    rows = [(f"slowdown {row['slowdown']:.2f}", row["ways"]) for row in found["slowdowns"]]
    rows += [("partition (Appendix A)", found["partition"]), ("large, above the floor", found["large"])]
    lines = [HEAD, *(_line(name, ways) for name, ways in rows)]
    return "\n".join([*lines, "mean, most; * where every plan is the best one"]) + "\n"


def _line(name: str, ways: dict[str, dict[str, float]]) -> str:
    cells = [
        f"{100 * way['mean']:>9.2f}, {100 * way['max']:>5.1f}{'*' if way['best'] == 1.0 else ' '}"
        for way in ways.values()
    ]
    return f"{name:<26}" + "".join(f"{cell:>18}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=60, help="of each slowdown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="progressive", help="of the result file and the picture")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    hard = [partition([rng.randint(1, 12) for _ in range(rng.randint(3, 6))]) for _ in range(arguments.instances // 2)]
    large = [drawn(rng, *LARGE, slowdown=1.25) for _ in range(max(1, arguments.instances // 6))]
    figures = {
        "instances": arguments.instances,
        "slowdowns": random_instances(arguments.instances, arguments.seed),
        "partition": measured(hard, best_latency),
        "large": measured(large, floor),
        "examples": [example(*one) for one in EXAMPLES],
    }
    print(table(figures), end="")
    print(f"written: {write(arguments.name, 'bench.progressive', figures, arguments.seed)}")
    if (picture := FIGURES["progressive"](figures, RESULTS / f"{arguments.name}.png")) is not None:
        print(f"drawn: {picture}")


if __name__ == "__main__":
    main()

"""Instances of graph switching (CoordGen, 3.2): the paper's examples, random ones, and those of Appendix A."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations_with_replacement, permutations

from edgellm.coldstart.graph_switching import Instance, Plan, Switch, latency, naive, progressive, synchronous

Policy = Callable[[Instance], Plan]


def optimum(instance: Instance) -> Plan:
    """Return the plan of least latency, for small instances (4 blocks, 3 chunks): each order and all steps are tried.
    The problem is NP-hard (Appendix A)."""
    steps = list(combinations_with_replacement(range(instance.steps + 1), instance.blocks))
    plans = (tuple(map(Switch, order, at)) for order in permutations(range(instance.blocks)) for at in steps)
    return min(plans, key=partial(latency, instance))


def late_greedy(instance: Instance) -> Plan:
    """Start the paper's greedy after 0, 1, 2 ... all computations; return the best of these plans and of `naive`.

    The early greedy hides loads as soon as it can, and pays for each with the slower graph in every later chunk.
    Started later it can hide as much and pay less.
    """
    plans = [progressive(instance, first) for first in range(instance.steps + 1)]
    return min((*plans, naive(instance)), key=lambda plan: latency(instance, plan))


POLICIES: dict[str, Policy] = {
    "synchronous": synchronous, "naive": naive, "progressive": progressive, "unhurried": late_greedy,
}  # fmt: skip


EXAMPLES = (
    ("Four blocks, two chunks, decode graphs 25 % slower (Fig. 8)",
     Instance((2.0,) * 4, (2.5,) * 4, (4.0,) * 4, chunks=2), ("synchronous", "naive", "progressive")),
    ("Four blocks, three chunks, decode graphs half as fast",
     Instance((2.0,) * 4, (4.0,) * 4, (4.0,) * 4, chunks=3), ("naive", "progressive", "unhurried")),
)  # fmt: skip


def drawn(rng: random.Random, blocks: int, chunks: int, slowdown: float) -> Instance:
    """Draw a random instance; its decode graphs take `slowdown` times as long as the others, on average."""
    prefill = [rng.uniform(0.5, 1.5) for _ in range(blocks)]
    decode = [seconds * (1.0 + (slowdown - 1.0) * rng.uniform(0.5, 1.5)) for seconds in prefill]
    scale = 2.0 ** rng.uniform(-1.5, 2.5)
    load = [scale * rng.uniform(0.5, 1.5) for _ in range(blocks)]
    return Instance(tuple(prefill), tuple(decode), tuple(load), chunks)


def partition(items: Sequence[int]) -> Instance:
    """Return the instance that Appendix A derives from whole numbers: halving their sum hides every load.

    There is a block for each number, the time of its load, and a long one after them, which takes half the sum and
    loads in no time; two chunks. The paper's symbols are lost, so this is reconstructed: the decode graphs are as fast
    as the others, and the short blocks so fast that all their computations hide less than half a unit. All times are
    whole numbers. The optimum is the time of the prefill alone if the numbers can be halved, and more if not.
    """
    unit = 8 * len(items)
    compute = (*[1.0] * len(items), sum(items) * unit / 2)
    return Instance(compute, compute, (*(float(unit * item) for item in items), 0.0), chunks=2)

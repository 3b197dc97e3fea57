"""Progressive graph switching: a model changes its graphs block by block while it computes (CoordGen, 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Instance:
    """A model cut into m blocks, which prefill `chunks` chunks one after the other and are each switched once.

    `prefill`, `decode` and `load`, (m,) each, in seconds or any other unit of time: to compute a chunk with a block's
    prefill graph, to compute the same chunk with its decode graph (run once a sub-chunk, so never faster), and to load
    its decode graph. Step s, from 0, is block s % m on chunk s // m.
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    load: tuple[float, ...]
    chunks: int

    @property
    def blocks(self) -> int:
        return len(self.prefill)

    @property
    def steps(self) -> int:
        """Number of computations in a whole prefill."""
        return self.blocks * self.chunks

    def time(self, block: int, switched: bool) -> float:
        """Return the time to compute a chunk with a block's graph."""
        return (self.decode if switched else self.prefill)[block]


class Switch(NamedTuple):
    """A load of `block`'s decode graph after the first `step` computations; its next computation waits for it."""

    block: int
    step: int


Plan = tuple[Switch, ...]
"""Switches in the order of their loads: every block once, at steps from 0 to `Instance.steps` that never fall."""


@dataclass(frozen=True, slots=True)
class Span:
    """A block computes a chunk from `start` to `end`, with its decode graph where `switched`; or loads that graph."""

    block: int
    start: float
    end: float
    chunk: int = -1
    switched: bool = True


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated plan: all computations and loads, each in order of time."""

    computes: tuple[Span, ...]
    loads: tuple[Span, ...]

    @property
    def latency(self) -> float:
        """The objective to minimise: the end of both the prefill and the last switch."""
        return max(self.computes[-1].end, self.loads[-1].end)


def simulate(instance: Instance, plan: Plan) -> Timeline:
    """Return the timeline of a plan.

    Computations are serial, and so are loads; both run side by side, but not for one block. Everything starts as early
    as the plan allows. That loses nothing: for any schedule, the plan of the computation counts at which its loads
    start is never later.

    Raises `InvalidOption` unless the plan switches each block once, at ascending steps of the instance.
    """
    computed, loaded = 0.0, 0.0  # end of the last computation and of the last load
    ready: dict[int, float] = {}
    computes: list[Span] = []
    loads: list[Span] = []
    waiting = list(reversed(plan))
    for step in range(instance.steps + 1):
        while waiting and waiting[-1].step == step:
            block = waiting.pop().block
            start = max(computed, loaded)
            loaded = ready[block] = start + instance.load[block]
            loads.append(Span(block, start, loaded))
        if step < instance.steps:
            chunk, block = divmod(step, instance.blocks)
            start = max(computed, ready.get(block, 0.0))
            computed = start + instance.time(block, block in ready)
            computes.append(Span(block, start, computed, chunk, block in ready))
    return Timeline(tuple(computes), tuple(loads))


def latency(instance: Instance, plan: Plan) -> float:
    """Return `simulate(instance, plan).latency`."""
    return simulate(instance, plan).latency


def synchronous(instance: Instance) -> Plan:
    """Switch every block after the whole prefill (Fig. 8b, 1)."""
    return tuple(Switch(block, instance.steps) for block in range(instance.blocks))


def naive(instance: Instance) -> Plan:
    """Switch every block as soon as its last computation is over, so during the last chunk only (Fig. 8b, 2)."""
    first = instance.steps - instance.blocks
    return tuple(Switch(block, first + block + 1) for block in range(instance.blocks))


def progressive(instance: Instance, first: int = 0) -> Plan:
    """Return the paper's greedy plan (equations 1 and 2), in rounds that begin after the `first` computations.

    Some symbols of the equations are missing from the available text; the following is inferred from the surrounding
    words and the example of four blocks, two chunks and two computations a load (Fig. 8). Let i be the block that
    computes next, wrapping around to block 0 at the end of a chunk, and t(x) the time of a block with its present
    graph: decode if its load has begun, else prefill. Then

    - the block to load is the *last one not switched*: of the blocks not switched yet, the one whose next computation
      is furthest away, so the last in the order i, i+1, ..., m-1, 0, ..., i-1; its index is j;
    - (1) k computations hide the load if t(i) + t(i+1) + ... + t(i+k-1) >= load(j), indices modulo m;
    - (2) the round's k is the least such number, with j itself not among these computations.

    The round starts to load j and computes k blocks; then the next round starts. The paper does not cover places where
    no k satisfies (1). Here the next block then computes without a load, and the round is tried again after it; a load
    too long for any round starts after j's own computation, where most of it is hidden. Blocks left over when the
    rounds end are loaded after the prefill.
    """
    m, step = instance.blocks, first
    left, plan = set(range(m)), list[Switch]()
    while left and step < instance.steps:
        distance, block = max(((block - step) % m, block) for block in left)
        at, end, covered = step, min(step + distance, instance.steps), 0.0
        while at < end and covered < instance.load[block]:
            covered += instance.time(at % m, at % m not in left)
            at += 1
        if covered < instance.load[block] and distance < m - 1:
            step += 1
            continue
        plan.append(Switch(block, step))
        left.remove(block)
        step = at
    return *plan, *(Switch(block, instance.steps) for block in sorted(left))

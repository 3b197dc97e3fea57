"""Progressive graph switching: a model changes its graphs block by block while it computes (CoordGen, 3.2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from edgellm.coldstart.problem import MARGIN


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


Mask = int  # bit b is set where block b is switched


class SwitchState(NamedTuple):
    """A partial schedule: the blocks switched, when computing and loading are free again, and the switches made.

    `pending` is the block whose next computation may have to wait for its load, -1 for none: only the block loaded last
    can be pending. The other fields are for loads within one step, which `start`s when the previous step is over. Loads
    followed by another load can be permuted, so only one order is explored, in which all loads but the `last` ascend;
    `inner` is the highest of the ascending blocks.
    """

    mask: Mask
    computed: float
    loaded: float
    pending: int
    plan: Plan
    start: float = 0.0
    inner: int = -1
    last: int = -1


def beam(instance: Instance, width: int = 16) -> Plan:
    """Return a plan near the optimum in polynomial time, never worse than the schedules above: at most about m^4 n
    `width` partial plans, for m blocks and n chunks.

    Dynamic programming over (computations done, set of blocks switched). Partial plans differ only in when computing
    and loading are free again and in a pending block, so most are dominated; others cannot beat the best known plan. Of
    the rest, the `width` most promising plans with the same number of computations and switches are followed; the
    default seldom misses the optimum, and then by little. With an unlimited width the plan is the optimum; the problem
    is NP-hard (Appendix A).
    """
    schedules = (synchronous(instance), naive(instance), progressive(instance))
    best = min(schedules, key=lambda plan: latency(instance, plan))
    search = _Beam(instance, width, latency(instance, best) * (1.0 - MARGIN))
    layer = [SwitchState(0, 0.0, 0.0, -1, ())]
    for step in range(instance.steps):
        following: dict[Mask, list[SwitchState]] = {}
        opened = search.promising(step + 1, (search.after_compute(step, node) for node in layer))
        while opened:
            for node in opened:
                _add_state(following.setdefault(node.mask, []), search.after_step(step + 1, node))
            opened = search.promising(step + 1, chain.from_iterable(search.after_load(step, node) for node in opened))
        layer = search.promising(step + 1, chain.from_iterable(following.values()))
    plans = [search.finished(node) for node in layer]
    return min((best, *plans), key=lambda plan: latency(instance, plan))


class _Beam:
    """The steps of `beam`. A partial plan that cannot be over before the `target` is left out."""

    def __init__(self, instance: Instance, width: int, target: float) -> None:
        self._instance, self._width, self._target = instance, width, target
        self._bounds: dict[tuple[int, Mask], tuple[float, float]] = {}

    def _time(self, block: int, mask: Mask) -> float:
        return self._instance.time(block, bool(mask >> block & 1))

    def _computing(self, first: int, end: int, mask: Mask) -> float:
        """Return the time of the computations from `first` to before `end`, if nothing more is switched."""
        return sum(self._time(at % self._instance.blocks, mask) for at in range(first, end))

    def _left(self, mask: Mask) -> list[int]:
        return [block for block in range(self._instance.blocks) if not mask >> block & 1]

    def _bound(self, step: int, node: SwitchState) -> tuple[float, float]:
        """Return a partial plan's lower bound, as if its loads made no graph slower; and to break ties, the end of its
        loads if made one by one from now on."""
        key = step, node.mask
        if key not in self._bounds:
            loads = math.fsum(self._instance.load[block] for block in self._left(node.mask))
            self._bounds[key] = self._computing(step, self._instance.steps, node.mask), loads
        computing, loads = self._bounds[key]
        return max(node.computed + computing, node.loaded + loads), max(node.computed, node.loaded) + loads

    def promising(self, step: int, nodes: Iterable[SwitchState]) -> list[SwitchState]:
        """Return the best `width` of these partial plans for each number of switches, as different numbers do not
        compare, without those that cannot beat the target."""
        ranked = [(self._bound(step, node), at, node) for at, node in enumerate(nodes)]
        seen: Counter[int] = Counter()
        kept = []
        for (least, _), _, node in sorted(ranked, key=itemgetter(0, 1)):
            seen[node.mask.bit_count()] += 1
            if least < self._target and seen[node.mask.bit_count()] <= self._width:
                kept.append(node)
        return kept

    def after_compute(self, step: int, node: SwitchState) -> SwitchState:
        """Return the partial plan with the step computed by the block's current graph.

        Plans in which the computation waits for a load of this block to begin need not be explored: the load can begin
        earlier, swap places with the previous one, or follow the computation, which then uses the prefill graph;
        nothing ends later.
        """
        block, start = step % self._instance.blocks, node.computed
        begin = max(start, node.loaded) if node.pending == block else start
        return node._replace(computed=begin + self._time(block, node.mask), start=start)

    def after_load(self, step: int, node: SwitchState) -> Iterator[SwitchState]:
        """Yield the partial plans with one more load that begins before the step is over."""
        begin = max(node.start, node.loaded)
        if begin >= node.computed or node.last < node.inner:
            return
        for block in self._left(node.mask):
            if block != step % self._instance.blocks:
                loaded, plan = begin + self._instance.load[block], (*node.plan, Switch(block, step))
                yield SwitchState(
                    node.mask | 1 << block, node.computed, loaded, block, plan, node.start, node.last, block
                )  # fmt: skip

    def after_step(self, step: int, node: SwitchState) -> SwitchState:
        """Return the partial plan before the next step; a block surely loaded in time is no longer pending."""
        wait, pending = node.loaded - node.computed, node.pending
        if pending >= 0:
            own_step = step + (pending - step) % self._instance.blocks
            if own_step >= self._instance.steps or wait <= self._computing(step, own_step, node.mask):
                pending = -1
        return SwitchState(node.mask, node.computed, node.loaded, pending, node.plan)

    def finished(self, node: SwitchState) -> Plan:
        """Return a whole schedule; blocks not switched yet come after the prefill."""
        return *node.plan, *(Switch(block, self._instance.steps) for block in self._left(node.mask))


def _add_state(nodes: list[SwitchState], new: SwitchState) -> None:
    """Add a partial plan to those with the same steps and switched blocks, and drop dominated plans."""
    if not any(_dominates(node, new) for node in nodes):
        nodes[:] = [node for node in nodes if not _dominates(new, node)]
        nodes.append(new)


def _dominates(one: SwitchState, other: SwitchState) -> bool:
    """Return whether `one` dominates `other`: every continuation of `other` is possible after `one`, no later."""
    if one.computed > other.computed or one.loaded > other.loaded:
        return False
    return one.pending < 0 or one.pending == other.pending or one.loaded <= other.computed

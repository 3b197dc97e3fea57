"""Progressive graph switching: a model changes its graphs block by block while it computes (CoordGen, 3.2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from edgellm.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class Instance:
    """A model cut into m blocks, which prefill `chunks` chunks one after the other and are each switched once.

    `prefill`, `decode` and `load`, (m,) each, in seconds or any other unit of time: to compute a chunk with a block's
    prefill graph, to compute the same chunk with its decode graph (run once a sub-chunk, so never faster), and to load
    its decode graph. Step s, from 0, is block s % m on chunk s // m.

    Raises `InvalidOption` if the lengths differ, a time is negative or not finite, or a decode graph is the faster one.
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    load: tuple[float, ...]
    chunks: int

    def __post_init__(self) -> None:
        lengths = (len(self.prefill), len(self.decode), len(self.load))
        if len(set(lengths)) > 1 or not self.prefill:
            raise InvalidOption(
                f"The times are of {lengths[0]} (prefill), {lengths[1]} (decode) and {lengths[2]} (load) blocks.",
                "Give the three times of every block, and at least one block.",
            )
        if not isinstance(self.chunks, int) or self.chunks < 1:
            raise InvalidOption(f"chunks is {self.chunks}.", "Give a whole number of at least 1.")
        for name in ("prefill", "decode", "load"):
            for block, seconds in enumerate(getattr(self, name)):
                if not (math.isfinite(seconds) and seconds >= 0.0):
                    raise InvalidOption(f"The {name} time of block {block} is {seconds}.", "Give a time of 0 or more.")
        for block, (fast, slow) in enumerate(zip(self.prefill, self.decode, strict=True)):
            if slow < fast:
                raise InvalidOption(
                    f"Block {block} computes a chunk in {slow} with its decode graph and in {fast} with the other.",
                    "Use the decode graph for everything: there is nothing to schedule.",
                )

    @property
    def blocks(self) -> int:
        return len(self.prefill)

    @property
    def steps(self) -> int:
        """Number of computations in a whole prefill."""
        return self.blocks * self.chunks


@dataclass(frozen=True, slots=True)
class Switch:
    """A load of `block`'s decode graph after the first `step` computations; its next computation waits for it."""

    block: int
    step: int


Plan = tuple[Switch, ...]
"""Switches in the order of their loads: every block once, at steps from 0 to `Instance.steps` that never fall."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A block computes a chunk from `start` to `end`, with its decode graph where `switched`."""

    block: int
    chunk: int
    switched: bool
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Load:
    """The decode graph of a block is loaded from `start` to `end`."""

    block: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated plan: all computations and loads, each in order of time."""

    computes: tuple[Compute, ...]
    loads: tuple[Load, ...]

    @property
    def prefill_end(self) -> float:
        return self.computes[-1].end

    @property
    def switch_end(self) -> float:
        return self.loads[-1].end

    @property
    def latency(self) -> float:
        """The objective to minimise: when both the prefill and the last switch are over."""
        return max(self.prefill_end, self.switch_end)


def simulate(instance: Instance, plan: Plan) -> Timeline:
    """Return the timeline of a plan.

    Computations are serial, and so are loads; both run side by side, but not for one block. Everything starts as early
    as the plan allows. That loses nothing: for any schedule, the plan of the computation counts at which its loads
    start is never later.

    Raises `InvalidOption` unless the plan switches each block once, at ascending steps of the instance.
    """
    check(instance, plan)
    computed, loaded = 0.0, 0.0  # until when each of the two lines is taken
    ready: dict[int, float] = {}
    computes: list[Compute] = []
    loads: list[Load] = []
    waiting = list(reversed(plan))
    for step in range(instance.steps + 1):
        while waiting and waiting[-1].step == step:
            block = waiting.pop().block
            start = max(computed, loaded)
            loaded = ready[block] = start + instance.load[block]
            loads.append(Load(block, start, loaded))
        if step < instance.steps:
            chunk, block = divmod(step, instance.blocks)
            switched = block in ready
            start = max(computed, ready.get(block, 0.0))
            computed = start + (instance.decode if switched else instance.prefill)[block]
            computes.append(Compute(block, chunk, switched, start, computed))
    return Timeline(tuple(computes), tuple(loads))


def latency(instance: Instance, plan: Plan) -> float:
    """Return `simulate(instance, plan).latency`."""
    return simulate(instance, plan).latency


def check(instance: Instance, plan: Sequence[Switch]) -> None:
    """Raise `InvalidOption` if `simulate` cannot run the plan."""
    blocks = [switch.block for switch in plan]
    if sorted(blocks) != list(range(instance.blocks)):
        raise InvalidOption(
            f"The plan switches the blocks {blocks}.", f"Switch each of 0 to {instance.blocks - 1} once."
        )
    steps = [switch.step for switch in plan]
    if steps != sorted(steps) or steps[0] < 0 or steps[-1] > instance.steps:
        raise InvalidOption(
            f"The plan switches at the steps {steps}.",
            f"Give steps from 0 to {instance.steps}, each no lower than the one before it.",
        )


def synchronous(instance: Instance) -> tuple[Plan, str]:
    """Switch every block after the whole prefill (Fig. 8b, 1)."""
    plan = tuple(Switch(block, instance.steps) for block in range(instance.blocks))
    return described(instance, plan, "everything is loaded after the prefill")


def naive(instance: Instance) -> tuple[Plan, str]:
    """Switch every block as soon as its last computation is over, so during the last chunk only (Fig. 8b, 2)."""
    first = instance.steps - instance.blocks
    plan = tuple(Switch(block, first + block + 1) for block in range(instance.blocks))
    return described(instance, plan, "each block is loaded after its last chunk")


def progressive(instance: Instance) -> tuple[Plan, str]:
    """Return the paper's greedy plan (equations 1 and 2), in rounds from the first computation on.

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
    plan = _rounds(instance, 0)
    return described(instance, plan, "rounds from the start, each with the fewest computations that hide a load")


def late_greedy(instance: Instance) -> tuple[Plan, str]:
    """Start the same greedy after 0, 1, 2 ... all computations; return the best of these plans and of `naive`.

    The early greedy hides loads as soon as it can, and pays for each with the slower graph in every later chunk.
    Started later it can hide as much and pay less. O(m^3 n^2).
    """
    candidates = [(_rounds(instance, first), first) for first in range(instance.steps + 1)]
    plan, first = min(candidates, key=lambda candidate: latency(instance, candidate[0]))
    late = naive(instance)[0]
    if latency(instance, late) < latency(instance, plan):
        return described(instance, late, "no round pays: each block is loaded after its last chunk")
    return described(instance, plan, f"greedy rounds, started after {first} of {instance.steps} computations")


def described(instance: Instance, plan: Plan, how: str) -> tuple[Plan, str]:
    """Return the plan, and a sentence on what it does and costs."""
    time, least = latency(instance, plan), instance.chunks * sum(instance.prefill)
    return plan, f"{how}: {time:.4g}; a prefill without switching takes {least:.4g}"


def _rounds(instance: Instance, first: int) -> Plan:
    """Return the plan of the greedy's rounds, started after `first` computations."""
    m, step = instance.blocks, first
    left = set(range(m))
    plan = []
    while left and step < instance.steps:
        distance, block = max(((block - step) % m, block) for block in left)
        at, end, covered = step, min(step + distance, instance.steps), 0.0
        while at < end and covered < instance.load[block]:
            covered += (instance.prefill if at % m in left else instance.decode)[at % m]
            at += 1
        if covered < instance.load[block] and distance < m - 1:
            step += 1
            continue
        plan.append(Switch(block, step))
        left.remove(block)
        step = at
    return *plan, *(Switch(block, instance.steps) for block in sorted(left))


WIDTH = 8
"""Beginnings that `beam` follows for each number of switches: enough to miss the optimum seldom, and then by little."""
MAX_PARTIAL = 1_000_000
"""Beginnings that `optimum` looks at before it gives up: about half a minute."""
MARGIN = 1e-9
"""A plan is better where it is so by more than this share; rounding makes smaller differences."""

Mask = int  # bit b is set where block b is switched
Trail = tuple["Trail", Switch] | None  # the switches so far, the last one first


class SwitchState(NamedTuple):
    """A partial schedule: the blocks switched, when computing and loading are free again, and the switches made.

    `pending` is the block whose next computation may have to wait for its load, -1 for none: it can only be the one
    loaded last. The other fields are for loads within one step, which `start`s when the previous step is over. Those
    followed by another load can be permuted, so only one order is explored, in which all but the `last` ascend; `inner`
    is the highest of these.
    """

    mask: Mask
    computed: float
    loaded: float
    pending: int
    trail: Trail
    start: float = 0.0
    inner: int = -1
    last: int = -1


def optimum(instance: Instance, most: int = MAX_PARTIAL) -> tuple[Plan, str]:
    """Return the plan of least latency (to 1e-9), and how it was found. For small instances (8 blocks, 8 chunks).

    Dynamic programming over (computations done, set of blocks switched). A partial plan matters only by when computing
    and loading are free again and whether a block is still waited for, so most are dominated; others cannot beat the
    plan of `beam` (`LowerBounds`). Exponential in the number of blocks: the problem is NP-hard (Appendix A).

    Raises `InvalidOption` if it would explore more than `most` partial plans.
    """
    best, _ = beam(instance)
    found, visited, _ = _search(instance, latency(instance, best), None, most)
    return described(instance, found or best, f"the optimal plan, found after {visited} partial plans")


def beam(instance: Instance, width: int = WIDTH) -> tuple[Plan, str]:
    """Return a plan near the optimum in polynomial time, never worse than the other heuristics.

    The search of `optimum`, restricted to the `width` most promising partial plans with the same number of computations
    and switches: at most about m^4 n `width` of them, for m blocks and n chunks.

    Raises `InvalidOption` for a width below 1.
    """
    if width < 1:
        raise InvalidOption(
            f"The width of the beam is {width}.", f"Give a whole number of at least 1, such as {WIDTH}."
        )
    best, _ = late_greedy(instance)
    found, _, thinned = _search(instance, latency(instance, best), width, None)
    how = f"the best of a beam {width} wide" if thinned else "the optimal plan"
    return described(instance, found or best, how)


def floor(instance: Instance) -> float:
    """Return a lower bound on the latency of every plan, also for instances too large for `optimum`."""
    return max(LowerBounds(instance).rest(0, 0), math.fsum(instance.load))


class LowerBounds:
    """Lower bounds on the time that is left after a beginning."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.m, self.steps = instance.blocks, instance.steps
        self._rest: dict[tuple[int, Mask], float] = {}
        self._loads: dict[Mask, float] = {}

    def time(self, block: int, mask: Mask) -> float:
        """Return the time to compute a chunk with the graph that the block has."""
        return (self.instance.decode if mask >> block & 1 else self.instance.prefill)[block]

    def until(self, step: int, block: int, mask: Mask) -> float:
        """Return the least time from `step` to the block's next computation; infinite if it has none."""
        own_step = step + (block - step) % self.m
        return sum(self.time(at % self.m, mask) for at in range(step, own_step)) if own_step < self.steps else math.inf

    def loads(self, mask: Mask) -> float:
        """Return the time to load all blocks that are not switched."""
        if mask not in self._loads:
            self._loads[mask] = math.fsum(self.instance.load[block] for block in self.unswitched(mask))
        return self._loads[mask]

    def unswitched(self, mask: Mask) -> list[int]:
        return [block for block in range(self.m) if not mask >> block & 1]

    def rest(self, step: int, mask: Mask) -> float:
        """Return a lower bound on the time for all work from `step` on, however the loads are placed.

        A block's load comes either before its last computation, which then takes its decode time, or after it. Let f be
        the first block of the latter kind: all blocks of that kind are loaded after f's last computation, one after the
        other. The blocks after f are divided between both kinds, one of them fractionally, so that computing and
        loading end together.
        """
        if (step, mask) not in self._rest:
            self._rest[step, mask] = self._least(step, mask)
        return self._rest[step, mask]

    def _least(self, step: int, mask: Mask) -> float:
        last: dict[int, tuple[int, float]] = {}  # each block's last computation, and when it ends
        at = 0.0
        for own_step in range(step, self.steps):
            at += self.time(own_step % self.m, mask)
            last[own_step % self.m] = own_step, at
        slower = {
            block: self.instance.decode[block] - self.instance.prefill[block]
            for block in self.unswitched(mask)
            if block in last
        }
        best = whole = at + sum(slower.values())
        for first, saved in slower.items():
            behind = [block for block in slower if last[block] > last[first]]
            computed = whole - saved - sum(slower[block] for block in behind)
            loaded = last[first][1] + self.instance.load[first] + sum(self.instance.load[block] for block in behind)
            best = min(best, self._level(computed, loaded, behind, slower))
        return best

    def _level(self, computed: float, loaded: float, behind: list[int], slower: dict[int, float]) -> float:
        """Return the later of both lines' ends after moving blocks from the second to the first, cheapest first."""
        load = self.instance.load
        for block in sorted((b for b in behind if load[b] > 0.0), key=lambda b: slower[b] / load[b]):
            if computed + slower[block] >= loaded - load[block]:
                part = max(0.0, (loaded - computed) / (slower[block] + load[block]))
                return max(computed + part * slower[block], loaded - part * load[block])
            computed += slower[block]
            loaded -= load[block]
        return max(computed, loaded)

    def bound(self, step: int, node: SwitchState) -> tuple[float, float]:
        """Return a partial plan's lower bound and, to break ties, when its loads end if made one by one from now on."""
        loads = self.loads(node.mask)
        least = max(node.computed + self.rest(step, node.mask), node.loaded + loads)
        return least, max(node.computed, node.loaded) + loads


def _search(instance: Instance, upper: float, width: int | None, most: int | None) -> tuple[Plan | None, int, bool]:
    """Return a plan faster than `upper`, None if none was found; the number of partial plans explored; and whether the
    width limit dropped some."""
    costs, target = LowerBounds(instance), upper * (1.0 - MARGIN)
    layer = [SwitchState(0, 0.0, 0.0, -1, None)]
    visited, thinned = 0, False

    def promising(step: int, nodes: Iterable[SwitchState]) -> list[SwitchState]:
        nonlocal visited, thinned
        kept = [(costs.bound(step, node), at, node) for at, node in enumerate(nodes)]
        visited += len(kept)
        if most is not None and visited > most:
            raise InvalidOption(
                f"The optimal plan for {instance.blocks} blocks and {instance.chunks} chunks needs more than {most}"
                " partial plans.",
                "Use beam, or raise the limit.",
            )
        found = [entry for entry in kept if entry[0][0] < target]
        if width is not None:
            found, before = _pruned(found, width), len(found)
            thinned |= len(found) < before
        return [node for _, _, node in found]

    for step in range(instance.steps):
        following: dict[Mask, list[SwitchState]] = {}
        opened = promising(step + 1, (_after_compute(costs, step, node) for node in layer))
        while opened:
            for node in opened:
                _add_state(following.setdefault(node.mask, []), _after_step(costs, step + 1, node))
            opened = promising(step + 1, (more for node in opened for more in _after_load(costs, step, node)))
        layer = promising(step + 1, chain.from_iterable(following.values()))
    ended = [(costs.bound(instance.steps, node)[1], at) for at, node in enumerate(layer)]
    time, at = min(ended, default=(math.inf, -1))
    return _plan(costs, layer[at]) if time < target else None, visited, thinned


def _after_compute(costs: LowerBounds, step: int, node: SwitchState) -> SwitchState:
    """Return the partial plan with the step computed by the block's current graph.

    Plans in which the computation waits for a load of this block to begin need not be explored: the load can begin
    earlier, swap places with the previous one, or follow the computation, which then uses the prefill graph; nothing
    ends later.
    """
    block, start = step % costs.m, node.computed
    begin = max(start, node.loaded) if node.pending == block else start
    return node._replace(computed=begin + costs.time(block, node.mask), start=start)


def _after_load(costs: LowerBounds, step: int, node: SwitchState) -> Iterator[SwitchState]:
    """Yield the beginnings with one more load that begins before the step is over."""
    begin = max(node.start, node.loaded)
    if begin >= node.computed or node.last < node.inner:
        return
    for block in costs.unswitched(node.mask):
        if block != step % costs.m:
            yield node._replace(
                mask=node.mask | 1 << block,
                loaded=begin + costs.instance.load[block],
                pending=block,
                trail=(node.trail, Switch(block, step)),
                inner=node.last,
                last=block,
            )


def _after_step(costs: LowerBounds, step: int, node: SwitchState) -> SwitchState:
    """Return the beginning before the next step; a block that is sure to be loaded in time is no longer pending."""
    wait = node.loaded - node.computed
    pending = node.pending
    if wait <= 0.0 or (pending >= 0 and wait <= costs.until(step, pending, node.mask)):
        pending = -1
    return SwitchState(node.mask, node.computed, node.loaded, pending, node.trail)


def _add_state(nodes: list[SwitchState], new: SwitchState) -> None:
    """Add a beginning to those with the same steps done and blocks switched, and keep only the undominated ones."""
    if not any(_dominates(node, new) for node in nodes):
        nodes[:] = [node for node in nodes if not _dominates(new, node)]
        nodes.append(new)


def _dominates(one: SwitchState, other: SwitchState) -> bool:
    """Return whether `one` dominates `other`: every continuation of `other` is possible after `one`, no later."""
    if one.computed > other.computed or one.loaded > other.loaded:
        return False
    return one.pending < 0 or one.pending == other.pending or one.loaded <= other.computed


Ranked = tuple[tuple[float, float], int, SwitchState]


def _pruned(ranked: list[Ranked], width: int) -> list[Ranked]:
    """Return the best `width` beginnings for each number of switches, as different numbers do not compare."""
    time: Counter[int] = Counter()
    kept = []
    for entry in sorted(ranked, key=itemgetter(0, 1)):
        many = entry[2].mask.bit_count()
        time[many] += 1
        if time[many] <= width:
            kept.append(entry)
    return kept


def _plan(costs: LowerBounds, node: SwitchState) -> Plan:
    """Return the switches of a whole schedule; blocks not switched yet come after the prefill."""
    switches = []
    trail = node.trail
    while trail is not None:
        trail, switch = trail
        switches.append(switch)
    return *reversed(switches), *(Switch(block, costs.steps) for block in costs.unswitched(node.mask))

"""A model changes its graphs while it computes: the instance, the plan, and what the plan takes (CoordGen, 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
                    "Keep the decode graph for everything: there is nothing to schedule.",
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
    """What a plan comes to: every computation and every load, each in order of time."""

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
        """When prefill and the last switch are both over: the objective to minimise."""
        return max(self.prefill_end, self.switch_end)


def simulate(instance: Instance, plan: Plan) -> Timeline:
    """Return when everything happens under a plan; the only place where that is computed.

    Computations are serial, and so are loads; both run side by side, but not for one block. Everything begins as early
    as the plan lets it. That loses nothing: of any schedule, number the computations that are over when each load
    begins, and the plan of these numbers is never later.

    Raises `InvalidOption` if the plan does not switch each block once, at steps of the instance that never fall.
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

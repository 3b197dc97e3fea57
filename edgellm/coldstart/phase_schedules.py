"""When to move what between two placements: CoordGen's three schedules (3.2, Fig. 8).

A block is a run of layers that have one device in the first placement and another in the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from edgellm.coldstart.phases import (
    Move,
    PhasedReply,
    PhaseProblem,
    cache_seconds,
    cut_of,
    fit_together,
    held,
    lacking,
    owners,
    simulate,
)
from edgellm.coldstart.problem import Cut, makespan, per_token, timeline

BLOCKS = 6
"""Blocks that a change of placements is cut into, as far as they are long enough: each of them may move by itself."""


@dataclass(frozen=True, slots=True)
class MovedLayers:
    """Layers from `start` to before `stop`, on `giver` in the first placement and on `taker` in the second."""

    start: int
    stop: int
    giver: int
    taker: int


def blocks(problem: PhaseProblem, start: Cut, target: Cut) -> tuple[MovedLayers, ...]:
    """Return the blocks between two placements, in the order of the layers: about `BLOCKS`, and one a run at least."""
    before, after = owners(problem.task, start), owners(problem.task, target)
    runs: list[MovedLayers] = []
    for layer in np.flatnonzero(before != after).tolist():
        giver, taker = int(before[layer]), int(after[layer])
        last = runs[-1] if runs else None
        if last is not None and (last.stop, last.giver, last.taker) == (layer, giver, taker):
            runs[-1] = replace(last, stop=layer + 1)
        else:
            runs.append(MovedLayers(layer, layer + 1, giver, taker))
    size = max(1, -(-sum(run.stop - run.start for run in runs) // BLOCKS))
    found = []
    for run in runs:
        parts = max(1, round((run.stop - run.start) / size))
        ends = np.linspace(run.start, run.stop, parts + 1).round().astype(int).tolist()
        found += [replace(run, start=a, stop=b) for a, b in pairwise(ends) if b > a]
    return tuple(found)


def moved(problem: PhaseProblem, before: Cut, some: Sequence[MovedLayers]) -> Cut | None:
    """Return the placement once these blocks have moved; None if a device cannot have what it would then have."""
    holders = owners(problem.task, before)
    for block in some:
        holders[block.start : block.stop] = block.taker
    cut = cut_of(holders)
    return cut if cut is not None and fit_together(problem, before, cut) else None


def synchronous(problem: PhaseProblem, start: Cut, target: Cut) -> PhasedReply:
    """Load everything after the first token, then move it, then write on (Fig. 8b, 1)."""
    first = makespan(problem.task, start)
    loads = lacking(problem, held(problem.task, start), target)
    loaded = first + max(loads.values(), default=0.0)
    took, source = cache_seconds(problem, start, target, problem.home.tokens_in + 1)
    token = per_token(problem.task, target)
    ready = loaded + took
    second = ready + (token if source == "sent" else 0.0)  # the pass that reads the text writes it
    move = Move(target, loads, first, loaded, source, ready, 1, first, max(0.0, second - first - token))
    return PhasedReply(start, (move,), tuple(knots_of(first, second, token, problem.home.tokens_out)))


def naive(problem: PhaseProblem, start: Cut, target: Cut) -> PhasedReply:
    """Move everything at the first token's end, each block loaded from its last computation on; the second token waits
    for each of them in turn (Fig. 8b, 2)."""
    task, spans = problem.task, timeline(problem.task, start)
    first = spans[-1].finish
    there, finish = held(task, start), {span.device: span.finish for span in spans}
    before, after = owners(task, start), owners(task, target)
    loads = np.where(there, 0.0, task.load)
    for device in {device for device, _ in target}:
        head_start = None
        for layer in np.flatnonzero((after == device) & ~there[device]).tolist():
            if head_start is None:
                head_start = first - finish[int(before[layer])]
            gone = min(head_start, float(loads[device, layer]))
            loads[device, layer] -= gone
            head_start -= gone
    reading = problem.reading(problem.home.tokens_in + 1)
    wait = makespan(replace(reading, load=loads, alone_load=loads.sum(1)), target)
    token = per_token(task, target)
    move = Move(
        target, lacking(problem, there, target), first, first + wait, "recomputed", first + wait, 1, first,
        max(0.0, wait - token),
    )  # fmt: skip
    return PhasedReply(start, (move,), tuple(knots_of(first, first + wait, token, problem.home.tokens_out)))


def progressive(problem: PhaseProblem, start: Cut, target: Cut) -> PhasedReply:
    """Return CoordGen's greedy (equations 1 and 2), with tokens as the computations that hide a load.

    In each round the last block that has not moved is loaded, and moves at the end of the first token after it. Where
    its device would then have two separate ranges of layers, the blocks before it move with it.
    """
    return simulate(problem, start, progressive_moves(problem, start, target))


def progressive_moves(problem: PhaseProblem, start: Cut, target: Cut) -> tuple[Cut, ...]:
    """Return the placements of `progressive`, one after the other."""
    left, cut, found = list(blocks(problem, start, target)), start, list[Cut]()
    while left:
        for many in range(1, len(left) + 1):
            following = moved(problem, cut, left[-many:])
            if following is not None:
                break
        else:
            return tuple(found)
        found.append(following)
        cut, left = following, left[:-many]
    return tuple(found)


def knots_of(first: float, second: float, token: float, tokens: int) -> Iterator[tuple[float, float]]:
    """Yield the knots of a reply whose first two tokens come at these moments, and the others evenly."""
    yield 1.0, first
    if tokens > 1:
        yield 2.0, second
    if tokens > 2:
        yield float(tokens), second + (tokens - 2) * token

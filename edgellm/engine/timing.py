"""Time measurements that hold on a busy machine: the least of interleaved repetitions, and how busy it was.

Other load on a machine makes a measurement longer, never shorter. So the least of several counts; rounds go over all
that is measured, because load comes and goes; and times that are still impossibly long are cut down.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import ceil, inf
from time import perf_counter
from typing import TypeVar

AGREE = 0.1
"""Largest difference of two measurements that agree, as a share."""
DIP = 4.0
"""Largest factor by which a decode may take longer than a decode of more rows. llama.cpp computes quantised rows in
fours, and the rest one by one: 3 rows may take 3 times as long as 4."""
GROWTH = 2.0
"""Largest factor by which a decode may take longer than decodes of fewer rows that add up to it."""

K = TypeVar("K", bound=Hashable)


def minimum_times(
    measure: Callable[[K], float], keys: Sequence[K], *, rounds: int, seconds: float, at_least: int = 1,
    clock: Callable[[], float] = perf_counter, samples: dict[K, list[float]] | None = None,
) -> dict[K, float]:  # fmt: skip
    """Return the minimum measurement of each key, in the order of first measurement. `samples`: earlier measurements by
    key, to which new ones are added, also if `measure` raises an error; keys with fewer measurements come first.

    All keys are measured in turn, for `rounds` rounds at most. It ends early once the minimum of every key has been
    measured twice (see `AGREE`), and after `seconds` of `clock` if `at_least` keys were measured.
    """
    samples = {} if samples is None else samples
    began, least = clock(), min((len(samples.get(key, ())) for key in keys), default=0)
    for count in range(least + 1, least + rounds + 1):
        for key in keys:
            if len(samples.get(key, ())) >= count:
                continue
            if len(samples) >= at_least and clock() - began > seconds:
                return {key: min(taken) for key, taken in samples.items()}
            taken = measure(key)  # a stopped measurement leaves the key without
            samples.setdefault(key, []).append(taken)
        if all(map(_repeated, samples.values())):
            break
    return {key: min(taken) for key, taken in samples.items()}


def _repeated(samples: Sequence[float]) -> bool:
    return sum(one <= (1.0 + AGREE) * min(samples) for one in samples) >= 2


def lower_quartile(samples: Sequence[float]) -> float:
    """Return the lower quartile, for samples that vary even without a disturbance, such as those of a disk or a
    network."""
    return sorted(samples)[(len(samples) - 1) // 4]


def plausible_times(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds for ascending `counts` of rows, reduced where a disturbance made them longer than on any
    device; see `DIP` and `GROWTH`. Real dips are kept."""
    found = list(seconds)
    shortest = inf
    for at in range(len(found) - 1, -1, -1):
        found[at] = min(found[at], DIP * shortest)
        shortest = min(shortest, found[at])
    for at in range(1, len(found)):
        pieces = (ceil(counts[at] / counts[less]) * found[less] for less in range(at))
        found[at] = min(found[at], GROWTH * min(pieces))
    return tuple(found)


def is_plausible(counts: Sequence[int], seconds: Sequence[float]) -> bool:
    """Return whether a device can take these seconds for ascending `counts` of rows."""
    return plausible_times(counts, seconds) == tuple(seconds)

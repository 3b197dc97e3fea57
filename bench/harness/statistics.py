"""Statistics of repeated measurements, and runs that take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable


def spread(values: list[float]) -> dict[str, float]:
    """Return the minimum, quartiles and maximum of repeated measurements."""
    ordered = sorted(values)
    low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else (ordered[0],) * 3
    return {"min": ordered[0], "q1": low, "median": middle, "q3": high, "max": ordered[-1]}


def alternate(repeats: int, *runs: Callable[[], float]) -> list[list[float]]:
    """Call the runs in turn, `repeats` times, and return what each returned.

    Every second time the order is reversed, so that drift affects all alike.
    """
    taken: list[list[float]] = [[] for _ in runs]
    for number in range(repeats):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for at in order:
            taken[at].append(runs[at]())
    return taken

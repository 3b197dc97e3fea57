"""Statistics of repeated measurements, and runs that take turns."""

import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

SAMPLES = 2_000  # of a bootstrap


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


def bootstrap(
    rows: npt.NDArray[np.float64], statistic: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
) -> tuple[float, float, float]:
    """Return a statistic of the means of columns, (n, columns), with its interval of 95 % over samples of the rows.

    `statistic` is handed several means at once, (samples, columns), and returns (samples,).
    """
    picked = np.random.default_rng(1).integers(len(rows), size=(SAMPLES, len(rows)))
    found = statistic(np.concatenate((rows.mean(0)[None], rows[picked].mean(1))))
    low, high = np.quantile(found[1:], (0.025, 0.975))
    return float(found[0]), float(low), float(high)

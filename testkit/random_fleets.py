"""Random fleets of nine families, easy and hard, for the planner, and all plans of small ones."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations

import numpy as np

from edgellm.coldstart.problem import Cut, Overlap, Task, fits

SAME = 3e-8  # share of T: the planner's margin, and rounding

Rng = np.random.Generator
Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # load, compute, cap, send


def _star(up: np.ndarray, down: np.ndarray, size: float) -> np.ndarray:
    """Return the seconds to send `size` between every two devices, by uplink or downlink (equation 20)."""
    times: np.ndarray = size / np.minimum(up[:, None], down[None, :])
    return times


def _base(rng: Rng, k: int, layers: int, spread: float = 4.0, disk: float = 3.0, comm: float = 1.0) -> Parts:
    """Draw loads around 0.2 s a layer, and computing times of a sixteenth to twice that, by the prompt's length."""
    load = 0.2 * disk ** rng.uniform(-0.5, 0.5, k)
    compute = 0.2 * spread ** rng.uniform(-0.5, 0.5, k) * 2.0 ** rng.uniform(-4.0, 1.0)
    cap = np.maximum(1, rng.uniform(1.0, 6.0, k) * layers / k).astype(int)
    up, down = rng.uniform(0.7, 1.6, k), rng.uniform(0.9, 1.8, k)
    return load, compute, cap, _star(up, down, 0.03 * comm)


def similar(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, _, send = _base(rng, k, layers, 1.21, 1.21)
    return load, compute, np.full(k, max(1, -(-3 * layers // k))), send


def wide(rng: Rng, k: int, layers: int) -> Parts:
    return _base(rng, k, layers, spread=60.0, disk=23.0)


def tight(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, _, send = _base(rng, k, layers)
    return load, compute, _tight(rng, k, layers), send


def _tight(rng: Rng, k: int, layers: int) -> np.ndarray:
    """Draw memories that together hold a quarter more than all layers."""
    share = rng.uniform(0.5, 1.5, k)
    cap: np.ndarray = np.maximum(1, np.floor(1.25 * layers * share / share.sum())).astype(int)
    while cap.sum() < 1.25 * layers:
        cap[rng.integers(k)] += 1
    return cap


def comm_heavy(rng: Rng, k: int, layers: int) -> Parts:
    return _base(rng, k, layers, comm=15.0)


def four_types(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, cap, _ = _base(rng, 4, layers)
    kind = rng.integers(0, 4, k)
    up, down = rng.uniform(0.7, 1.6, 4)[kind], rng.uniform(0.9, 1.8, 4)[kind]
    cap = np.maximum(1, cap * 8 // max(k, 1) + 1)[kind]
    return load[kind], compute[kind], cap, _star(up, down, 0.03)


def no_comm(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, cap, send = _base(rng, k, layers)
    return load, compute, cap, np.zeros_like(send)


def anti_correlated(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, cap, send = _base(rng, k, layers, spread=16.0, disk=10.0)
    return np.sort(load), np.sort(compute)[::-1].copy(), cap, send


def similar_tight(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, _, send = _base(rng, k, layers, 1.21, 1.21)
    return load, compute, _tight(rng, k, layers), send


def random_comm(rng: Rng, k: int, layers: int) -> Parts:
    load, compute, cap, _ = _base(rng, k, layers)
    return load, compute, cap, rng.uniform(0.0, 0.3, (k, k))


FAMILIES: dict[str, Callable[[Rng, int, int], Parts]] = {
    "similar": similar, "wide": wide, "memory-tight": tight, "comm-heavy": comm_heavy, "four types": four_types,
    "no communication": no_comm, "anti-correlated": anti_correlated, "similar and tight": similar_tight,
    "random communication": random_comm,
}  # fmt: skip


def drawn(family: str, rng: Rng, k: int, layers: int, overlap: Overlap = "paper") -> Task:
    """Draw a random task of a family: k devices that together hold the layers."""
    load, compute, cap, send = FAMILIES[family](rng, k, layers)
    while cap.sum() < layers:
        cap = cap + 1
    return uniform(load.tolist(), compute.tolist(), cap.tolist(), send, layers, overlap)


def uniform(
    load: Sequence[float], compute: Sequence[float], cap: Sequence[int], send: np.ndarray, layers: int,
    overlap: Overlap = "paper",
) -> Task:  # fmt: skip
    """Return a task of equal layers, from the seconds for a layer on each device, and the layers that each can hold.
    Further tokens take no time."""
    k, anywhere = len(load), np.ones((len(load), layers), dtype=bool)
    loads = np.outer(load, np.ones(layers))
    return Task(
        loads, np.outer(compute, np.ones(layers)), send, np.ones(layers), np.array(cap, dtype=float), overlap,
        np.zeros((k, layers)), np.zeros((k, k)), loads.sum(1), float(layers), anywhere, anywhere, anywhere[0],
        np.zeros(k),
    )  # fmt: skip


def every_plan(task: Task) -> Iterator[Cut]:
    """Yield every plan that fits: each order of each choice of devices, with each way to cut the layers."""
    for stages in range(1, min(task.devices, task.layers) + 1):
        for order in permutations(range(task.devices), stages):
            for ends in combinations(range(1, task.layers), stages - 1):
                edges = (0, *ends, task.layers)
                cut = tuple(zip(order, np.diff(edges).tolist(), strict=True))
                if fits(task, cut):
                    yield cut

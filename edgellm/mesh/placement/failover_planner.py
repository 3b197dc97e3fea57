"""Which remaining device takes which layers: the split with the least seconds for the rest of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.layer_range import LayerRange
from edgellm.mesh.placement.split import Share

_MOST = 10  # devices that are considered: the number of their sets doubles with each


@dataclass(frozen=True, slots=True)
class Able:
    """A device, the layers that it holds on its disk and those that it has loaded, and what they cost.

    `load` and `step`: seconds to load a layer, and to compute it for one token; `hop`: to send a token's rows to it;
    `most`: layers for which it has memory, and `memory`: bytes that it gives to models, 0 where it sets no limit.
    `begins` and `ends`: layers with which one of its ranges may begin and end, because a piece does; None: any.
    """

    name: str
    holds: frozenset[int]
    warm: frozenset[int] = frozenset()
    load: float = 1.0
    step: float = 0.05
    hop: float = 0.01
    most: int = 1 << 30
    memory: int = 0
    begins: frozenset[int] | None = None
    ends: frozenset[int] | None = None

    def takes(self, layers: LayerRange) -> bool:
        """Return whether these layers are there, and can be loaded without those around them."""
        return self.may_begin(layers.start) and self.may_end(layers.last) and self.holds.issuperset(layers)

    def may_begin(self, layer: int) -> bool:
        return self.begins is None or layer in self.begins

    def may_end(self, layer: int) -> bool:
        return self.ends is None or layer in self.ends


def cover(devices: Sequence[Able], layers: int, tokens: int = 64) -> tuple[Share, ...] | None:
    """Return the ranges, in order, for which loading and `tokens` more tokens take least; None if no split is possible.

    best[S][j]: the least seconds with the first j layers on the devices of the set S, each of which holds one range.
    Loads are added up as if one came after the other: with few devices that is what counts, and devices that have their
    layers loaded already are preferred.
    """
    devices = devices[:_MOST]
    full = 1 << len(devices)
    best = np.full((full, layers + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}  # (S, j): the device that came last, and where it begins
    costs = [_costs(device, layers, tokens) for device in devices]
    for held in range(full):
        for d, cost in enumerate(costs):
            after = held | 1 << d
            if after == held:
                continue
            through = best[held][:, None] + cost  # (i, j): from layer i to before layer j
            begin, value = through.argmin(axis=0), through.min(axis=0)
            for j in np.flatnonzero(value < best[after]).tolist():
                best[after, j] = value[j]
                came[after, j] = d, int(begin[j])
    held, j = int(best[:, layers].argmin()), layers
    if not np.isfinite(best[held, j]):
        return None
    shares: list[Share] = []
    while j:
        d, i = came[held, j]
        shares.append(Share(devices[d].name, LayerRange(i, j)))
        held, j = held & ~(1 << d), i
    return tuple(reversed(shares))


def _costs(device: Able, layers: int, tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the seconds for the layers from i to before j, (layers + 1, layers + 1); infinite where a layer is
    missing, where a piece would be cut in two, or j <= i."""
    found = np.full((layers + 1, layers + 1), np.inf)
    for i in filter(device.may_begin, range(layers)):
        seconds = tokens * device.hop
        for j in range(i + 1, min(layers, i + device.most) + 1):
            if j - 1 not in device.holds:
                break
            seconds += tokens * device.step + (0.0 if j - 1 in device.warm else device.load)
            if device.may_end(j - 1):
                found[i, j] = seconds
    return found

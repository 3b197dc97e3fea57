"""The search's records, and what it computes about the devices beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.coldstart.problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Ends of plans, all with equally many stages: arrays of one length.

    `placed`, the mask of their devices; `head`, the device of the first of these stages, K where there is none yet;
    `left`, the layers before it; `rho`, the latest moment at which it may start to receive or, if it is the first, to
    compute; `load`, its own load, which in the paper's timing comes before it receives. `parent` and `count`: the label
    one level up that it continues, and the layers of its own stage.
    """

    placed: Ints
    head: Ints
    left: Ints
    rho: Floats
    load: Floats
    parent: Ints
    count: Ints

    def __len__(self) -> int:
        return self.placed.size

    def take(self, which: np.ndarray) -> Labels:
        return Labels(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """New stages before labels: arrays of one length. `device` joins `placed` before `label`, which leaves `left`; it
    must be done by `due`, and has from `least` to `most` layers."""

    label: Ints
    device: Ints
    placed: Ints
    left: Ints
    due: Floats
    least: Ints
    most: Ints

    def take(self, which: np.ndarray) -> Stages:
        return Stages(*(getattr(self, name)[which] for name in self.__slots__))


def receiving(send: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the least and the most seconds to send to each device, (K,), and the most seconds that any third device
    takes more to send to the row's device than to the column's, (K, K).
    """
    k = send.shape[0]
    himself = np.eye(k, dtype=bool)
    least = np.where(himself, np.inf, send).min(0)
    most = np.where(himself, 0.0, send).max(0)
    more = np.where(himself[:, :, None] | himself[:, None, :], -np.inf, send[:, :, None] - send[:, None, :]).max(0)
    return least, most, np.where(np.isfinite(more), more, 0.0)


def twins(load: Floats, compute: Floats, room: Floats, send: Floats) -> list[tuple[int, int]]:
    """Return the pairs of identical devices: each device with the last one before it that is alike in everything."""
    pairs = []
    for device in range(room.size):
        for other in reversed(range(device)):
            swapped = np.arange(room.size)
            swapped[[device, other]] = other, device
            same = (cost[device] == cost[other] for cost in (load, compute, room))
            if all(np.all(equal) for equal in same) and np.array_equal(send[np.ix_(swapped, swapped)], send):
                pairs.append((device, other))
                break
    return pairs

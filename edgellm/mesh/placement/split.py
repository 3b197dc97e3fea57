"""A model's layers, shared out by name: as it is typed, planned, and told to people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange

if TYPE_CHECKING:
    from edgellm.coldstart.plan import Plan, Way

HERE = "here"
"""The name of this device in a split, and in a plan."""
EXAMPLE = "Give NAME:FIRST-LAST for every device, in order: --split here:1-12,desk:13-24"
_PART = re.compile(r"(.+):(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Share:
    """Layers, and the name of the device that is to hold them."""

    name: str
    layers: LayerRange


def read_split(text: str) -> tuple[Share, ...]:
    """Parse the value of `--split`: names and layers counted from 1, both ends included.

    Raises:
        InvalidOption: it is not a valid split.
    """
    shares = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise InvalidOption(f"{part.strip()!r} is no part of a split.", EXAMPLE)
        first, last = int(match[2]), int(match[3] or match[2])
        if not 1 <= first <= last:
            raise InvalidOption(f"{part.strip()!r} names layers that do not exist.", EXAMPLE)
        shares.append(Share(match[1], LayerRange(first - 1, last)))
    return tuple(shares)


def of_plan(plan: Plan) -> tuple[Share, ...]:
    """Return the shares of a plan."""
    return of_way(plan.way)


def of_way(way: Way) -> tuple[Share, ...]:
    """Return the shares of a way to hold the model."""
    return tuple(Share(stage.device, stage.layers) for stage in way.stages)


def ranges(layers: Iterable[int]) -> str:
    """Format layers, counted from 0, for people, who count from 1: 1-4, 7."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{a + 1}" if a == b else f"{a + 1}-{b + 1}" for a, b in runs) or "none"

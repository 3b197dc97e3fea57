"""Consecutive layers of a model, half-open and counted from 0, and the form in which people type them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from edgellm.errors import InvalidOption

HERE = "here"
"""The name of this device in a split, and in a plan."""
EXAMPLE = "Give NAME:FIRST-LAST for every device, in order: --split here:1-12,desk:13-24"
_PART = re.compile(r"(.+):(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """The layers from `start` to before `stop`. People see the range counted from 1, both ends included."""

    start: int
    stop: int

    @property
    def last(self) -> int:
        """Return the last layer, counted from 0."""
        return self.stop - 1

    @property
    def named(self) -> str:
        """Return the name for people: layer 4, or layers 4-6."""
        return f"layer{'s' if len(self) > 1 else ''} {self}"

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"{self.start + 1}" if len(self) == 1 else f"{self.start + 1}-{self.stop}"


@dataclass(frozen=True, slots=True)
class StageShare:
    """Layers, and the name of the device that is to hold them."""

    name: str
    layers: LayerRange

    def to_json(self) -> dict[str, Any]:
        """Return the share as JSON; layers are counted from 1, both included."""
        return {"device": self.name, "first_layer": self.layers.start + 1, "last_layer": self.layers.stop}


def read_split(text: str) -> tuple[StageShare, ...]:
    """Parse the value of `--split`: names and layers counted from 1, both ends included. Raise InvalidOption where it
    is not a valid split."""
    shares = []
    for part in map(str.strip, text.split(",")):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidOption(f"{part!r} is not a part of a split.", EXAMPLE)
        first, last = int(match[2]), int(match[3] or match[2])
        if not 1 <= first <= last:
            raise InvalidOption(f"{part!r} has an invalid range of layers.", EXAMPLE)
        shares.append(StageShare(match[1], LayerRange(first - 1, last)))
    return tuple(shares)


def ranges(layers: Iterable[int]) -> str:
    """Format layers, counted from 0, for people, who count from 1: 1-4, 7."""
    runs: list[LayerRange] = []
    for layer in sorted(layers):
        if runs and runs[-1].stop == layer:
            runs[-1] = LayerRange(runs[-1].start, layer + 1)
        else:
            runs.append(LayerRange(layer, layer + 1))
    return ", ".join(map(str, runs)) or "none"


def chain(ranges: Iterable[LayerRange], layers: LayerRange) -> tuple[LayerRange, ...]:
    """Return the fewest of `ranges` that make up `layers`, one after the other; empty if none do."""
    best: dict[int, tuple[LayerRange, ...]] = {layers.start: ()}
    for one in sorted(ranges):
        if one.start in best and one.stop <= layers.stop:
            found = (*best[one.start], one)
            if one.stop not in best or len(found) < len(best[one.stop]):
                best[one.stop] = found
    return best.get(layers.stop, ())

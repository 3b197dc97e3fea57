"""Consecutive layers of a model: one type for them everywhere, half-open and counted from 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """The layers from `start` to before `stop`. People are shown it counted from 1, both ends included."""

    start: int
    stop: int

    @property
    def last(self) -> int:
        """The last layer, counted from 0."""
        return self.stop - 1

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"{self.start + 1}" if len(self) == 1 else f"{self.start + 1}-{self.stop}"

"""The states of a text's latest positions, which a speculator reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from edgellm.engine.vocabulary import Floats

WINDOW = 1024
"""States of a sequence that are kept."""


class StateWindow:
    """The states of the latest positions of one sequence, without a gap: rows for the positions `first` to `end`."""

    def __init__(self, width: int, window: int = WINDOW) -> None:
        self.width = width
        self._rows = np.empty((window + max(1, window // 4), width), dtype=np.float32)  # takes memory as it fills
        self._address, self._row_bytes = self._rows.ctypes.data, 4 * width
        self._window = window
        self._at = 0  # the row of position `first`
        self.first = self.end = 0

    def add(self, start: int, states: Floats) -> None:
        """Add the `states` (n, width) of the positions from `start` on, in place of any that are known."""
        if not self.first <= start <= self.end:
            self.first = self.end = start
            self._at = 0
        self.end = start
        if (drop := len(states) - self._window) > 0:
            states, start = states[drop:], start + drop
            self.first = self.end = start
            self._at = 0
        n = len(states)
        if self._at + self.end - self.first + n > len(self._rows):
            kept = min(self.end - self.first, self._window - n)
            tail = self._at + self.end - self.first
            self._rows[:kept] = self._rows[tail - kept : tail].copy()
            self._at, self.first = 0, self.end - kept
        row = self._at + self.end - self.first
        self._rows[row : row + n] = states
        self.end += n

    def add_row(self, start: int, addresses: Sequence[int]) -> bool:
        """Add the state of position `start`, whose parts, of equal width, are at these addresses. Return False where
        that takes more than to copy it: see `add`. After a decode, numpy would take ten times as long."""
        row = self._at + start - self.first
        if not (self.first <= start <= self.end and row < len(self._rows)):
            return False
        part = self._row_bytes // len(addresses)
        to = self._address + row * self._row_bytes
        for address in addresses:
            ctypes.memmove(to, address, part)
            to += part
        self.end = start + 1
        return True

    def truncate(self, length: int) -> None:
        """Drop the states of all but the first `length` positions."""
        self.end = max(min(self.end, length), self.first)

    def clear(self) -> None:
        """Drop all states."""
        self.first = self.end = self._at = 0

    def of(self, start: int, end: int) -> Floats:
        """Return the states of the positions `start` to `end`, which are known, as a view."""
        row = self._at + start - self.first
        return self._rows[row : row + end - start]

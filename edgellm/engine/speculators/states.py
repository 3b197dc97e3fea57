"""States of a context's rows, which a speculator reads: handed over by llama.cpp, and kept.

llama.cpp exports the functions for its own server, by their C++ names in ELF and Mach-O files. Windows
builds lack them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.engine import native
from edgellm.engine.vocabulary import Floats
from edgellm.errors import EngineFailed

_KEEP = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_STATES = "_Z26llama_get_embeddings_nextnP13llama_context"
_KEEP_INPUTS = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_INPUTS = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
_POINTER, _LAYER, _BOOL = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool


@dataclass(frozen=True, slots=True)
class StateFunctions:
    """The functions, bound."""

    _keep: Any
    _states: Any
    _keep_inputs: Any
    _inputs: Any

    @staticmethod
    @functools.cache
    def find() -> StateFunctions | None:
        """Return the functions; None where the library lacks one of them."""
        library = native.llama()
        try:
            keep, states, keep_inputs, inputs = (
                getattr(library, name) for name in (_KEEP, _STATES, _KEEP_INPUTS, _INPUTS)
            )
        except AttributeError:
            return None
        return StateFunctions(
            native.bind(keep, None, _POINTER, _BOOL, _BOOL), native.bind(states, _POINTER, _POINTER),
            native.bind(keep_inputs, None, _POINTER, _LAYER, _BOOL), native.bind(inputs, _POINTER, _POINTER, _LAYER),
        )  # fmt: skip

    @staticmethod
    def require() -> StateFunctions:
        """Return the functions. Raise EngineFailed where the library lacks one of them."""
        if (found := StateFunctions.find()) is None:
            raise EngineFailed("This llama.cpp hands over no states.", "Take edgellm's own version.")
        return found

    def keep(self, context: native.Owned, *, every_row: bool) -> None:
        """Have a context keep its rows' last states: of every row, or of rows with logits alone."""
        self._keep(context.pointer, True, not every_row)

    def states(self, context: native.Owned, n: int, width: int) -> Floats | None:
        """Return the last states of the first `n` rows of the last computation, (n, width), as a view until the next
        computation; None without states."""
        return rows_at(self.state_address(context), n, width)

    def state_address(self, context: native.Owned) -> int:
        """Return the address of the last states of the rows of the last computation; 0 without states."""
        address: int | None = self._states(context.pointer)
        return address or 0

    def keep_inputs(self, context: native.Owned, layer: int) -> None:
        """Have a context keep the rows that enter a layer."""
        self._keep_inputs(context.pointer, layer, True)

    def input_address(self, context: native.Owned, layer: int) -> int:
        """Return the address of the rows that entered a layer, which must be kept, like `state_address`."""
        address: int | None = self._inputs(context.pointer, layer)
        return address or 0


def rows_at(address: int, n: int, width: int) -> Floats | None:
    """Return `n` rows of `width` floats at an address, as a view; None at address 0."""
    if not address:
        return None
    buffer: Any = (ctypes.c_float * (n * width)).from_address(address)
    return np.frombuffer(buffer, dtype=np.float32).reshape(n, width)


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
        """Add the state of position `start`, copied from its parts, of equal width, at these addresses; return False
        where only `add` can. After a decode, numpy would take ten times as long."""
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

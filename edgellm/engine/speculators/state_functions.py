"""Functions that llama.cpp exports for its own server, by their C++ names in ELF and Mach-O files: they hand over the
states of a context's rows. Windows builds lack them."""

from __future__ import annotations

import ctypes
import functools
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
        """Have a context keep its rows' last states: of every row, or of those with logits alone."""
        self._keep(context.pointer, True, not every_row)

    def states(self, context: native.Owned, n: int, width: int) -> Floats | None:
        """Return the last states of the first `n` rows of the last computation, (n, width), as a view until the next
        one; None where there are none."""
        return rows_at(self.state_address(context), n, width)

    def state_address(self, context: native.Owned) -> int:
        """Return where the last states of the rows of the last computation are; 0 where there are none."""
        address: int | None = self._states(context.pointer)
        return address or 0

    def keep_inputs(self, context: native.Owned, layer: int) -> None:
        """Have a context keep the rows that enter a layer."""
        self._keep_inputs(context.pointer, layer, True)

    def inputs(self, context: native.Owned, layer: int, n: int, width: int) -> Floats | None:
        """Return the first `n` rows that entered a layer, which must be kept, like `states`."""
        return rows_at(self.input_address(context, layer), n, width)

    def input_address(self, context: native.Owned, layer: int) -> int:
        """Return where the rows that entered a layer are, like `state_address`."""
        address: int | None = self._inputs(context.pointer, layer)
        return address or 0


def rows_at(address: int, n: int, width: int) -> Floats | None:
    """Return `n` rows of `width` floats at an address, as a view; None at address 0."""
    if not address:
        return None
    buffer: Any = (ctypes.c_float * (n * width)).from_address(address)
    return np.frombuffer(buffer, dtype=np.float32).reshape(n, width)

"""The base of speculators, which predict tokens from a verifier's own states.

llama.cpp computes a speculator in a context of its own beside the verifier's, the trunk. Its row for position p takes
the token at p and the verifier's state at p - 1, and predicts the token at p + 1. For further drafted tokens its own
state replaces the verifier's.

A `Context` with a speculator hands over the states of all rows that it decodes. The latest `WINDOW` states of each
sequence are kept, and the speculator reads them when it is first asked for a draft: a reply without drafts costs only
a copy of the states, and behind a long prompt its attention begins `WINDOW` tokens before the reply.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgellm.engine import native
from edgellm.engine.llama_api import LlamaBatch, NativeContext, NativeSpec
from edgellm.engine.native import Stop, lib
from edgellm.engine.vocabulary import Floats, Ids, common_prefix
from edgellm.errors import EngineFailed

_POINTER, _LAYER, _BOOL = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "keep": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, _POINTER, _BOOL, _BOOL),
    "states": ("_Z26llama_get_embeddings_nextnP13llama_context", _POINTER, _POINTER),
    "keep_inputs": ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, _POINTER, _LAYER, _BOOL),
    "inputs": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", _POINTER, _POINTER, _LAYER),
}
"""llama.cpp's functions over the states of a context's last computation: the name, and the types of the result and of
the arguments. `keep` (flag, only rows with logits) and `keep_inputs` (layer, flag) have a context keep its rows' last
states, and the rows that enter a layer; `states` and `inputs` (layer) return the address of what was kept, None
without."""


@functools.cache
def state_functions() -> Any:
    """Return the functions; None where the library lacks one of them."""
    try:
        found = {name: (native.LIBRARY.function(own), types) for name, (own, *types) in _FUNCTIONS.items()}
    except AttributeError:
        return None
    return SimpleNamespace(**{name: native.bind(function, *types) for name, (function, types) in found.items()})


def rows_at(address: int | None, n: int, width: int) -> Floats:
    """Return `n` rows of `width` floats at an address, as a view. Raise EngineFailed without an address."""
    if not address:
        raise EngineFailed("llama.cpp hands over no states.", "Report this.")
    buffer: Any = (ctypes.c_float * (n * width)).from_address(address)
    return np.frombuffer(buffer, dtype=np.float32).reshape(n, width)


WINDOW = 1024
"""States of a sequence that are kept."""


class StateWindow:
    """The states of the latest positions of one sequence, without a gap: rows for the positions `first` to `end`."""

    def __init__(self, width: int, window: int = WINDOW) -> None:
        self.width = width
        self._rows = np.empty((window + max(1, window // 4), width), dtype=np.float32)  # takes memory as it fills
        self._window = window
        self._at = 0  # the row of position `first`
        self.first = self.end = 0

    def add(self, start: int, states: Floats) -> None:
        """Add the `states` (n, width) of the positions from `start` on, in place of any that are known."""
        drop = max(0, len(states) - self._window)
        if drop or not self.first <= start <= self.end:
            self.first, self._at = start + drop, 0
        self.end, states, n = start + drop, states[drop:], len(states) - drop
        row = self._at + self.end - self.first
        if row + n > len(self._rows):
            kept = min(self.end - self.first, self._window - n)
            self._rows[:kept] = self._rows[row - kept : row].copy()
            self._at, self.first, row = 0, self.end - kept, kept
        self._rows[row : row + n] = states
        self.end += n

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


_ROWS = 64  # rows of a batch: llama.cpp reserves logits for each


def spec_beside(trunk: NativeSpec, *, mtp: bool = False) -> NativeSpec:
    """Return the parameters of a context beside the verifier's."""
    positions = trunk.n_ctx * trunk.sequences
    rows = max(trunk.sequences, min(_ROWS, positions))
    return NativeSpec(
        positions, trunk.sequences, rows, trunk.threads, unified=trunk.sequences == 1, cache_type=trunk.cache_type,
        flash=trunk.flash, mtp=mtp,
    )  # fmt: skip


class Speculator(ABC):
    """A predictor of tokens from the states of one context, for that context's thread.

    Subclasses define a state, and the part of a state that enters a row.
    """

    def __init__(
        self, trunk: NativeContext, spec: NativeSpec, owned: native.Owned, *, states: int, inputs: int, every: bool
    ) -> None:
        """Take over `owned`, the speculator's own context beside the `trunk`, the verifier's, which was opened by
        `spec`. `states` is the width of a trunk's state, `inputs` the width of a row's input and of the speculator's
        own states. `every`: all rows of a batch have states, not only rows with logits.
        """
        n_seq, rows = spec.sequences, spec_beside(spec).rows
        self._trunk = trunk
        self._context = NativeContext(owned, spec.threads, trunk.n_vocab)
        self._every, self._last_row = every, 0
        self._functions = state_functions()
        self._functions.keep(owned.pointer, True, not every)
        self._batch = LlamaBatch(rows, spec.n_ctx)
        self._inputs = np.zeros((rows, inputs), dtype=np.float32)
        self._native = self._batch.with_states(self._inputs)
        self._windows = [StateWindow(states) for _ in range(n_seq)]
        self._placed: list[tuple[int, int, int, int]] = []
        self._ids = np.zeros((n_seq, spec.n_ctx), dtype=np.int32)
        # The speculator's cache is right for each sequence's positions from `begins` to `held`.
        self._begins, self._held, self._next = [0] * n_seq, [0] * n_seq, [0] * n_seq

    @abstractmethod
    def _addresses(self) -> Sequence[int | None]:
        """Return the addresses of the parts of the states of the trunk's last decode; None for a missing part."""

    def _first(self, window: StateWindow) -> int:
        """Return the first position for which a row can be computed: behind the first state."""
        return window.first + 1

    @abstractmethod
    def _fill(self, seq: int, start: int, n: int) -> None:
        """Fill the inputs of `n` rows of a sequence for the positions from `start` on, which follow its cache."""

    def close(self) -> None:
        """Close the speculator's context; its memory is freed once no view of its logits is left."""
        self._context.close()

    def set_cancel(self, stop: Stop | None) -> None:
        """Have decodes end early once `stop` is set; see `Context.set_cancel`."""
        self._context.set_cancel(stop)

    def place(self, at: int, seq: int, start: int, n: int) -> None:
        """Note that the context's next decode has `n` positions of a sequence, from `start` on, from row `at` on."""
        self._placed = [*(self._placed if at else ()), (at, seq, start, n)]

    def note(self) -> None:
        """Take over the states of the context's last decode."""
        found, placed = self._addresses(), self._placed
        addresses = list(filter(None, found))
        if len(addresses) < len(found):
            for _, seq, _, _ in placed:
                self.clear(seq)
            return
        at, seq, _, n = placed[-1]
        width = self._windows[seq].width // len(addresses)
        states = np.concatenate([rows_at(address, at + n, width) for address in addresses], axis=1)
        for at, seq, start, n in placed:
            self._windows[seq].add(start, states[at : at + n])
            self._held[seq] = min(self._held[seq], start + 1)

    def truncate(self, seq: int, length: int) -> None:
        """Follow a rollback of the context's sequence."""
        self._windows[seq].truncate(length)
        self._held[seq] = min(self._held[seq], length + 1)

    def clear(self, seq: int) -> None:
        """Forget a sequence."""
        self._windows[seq].clear()
        self._begins[seq] = self._held[seq] = 0

    def predict(self, ids: Ids, seq: int = 0) -> Floats | None:
        """Return the logits (n_vocab,) of the token after `ids`, all of whose tokens but the last are in the context's
        cache; None where their states are not known. The view is valid until the next call. Raises Stopped:
        `set_cancel`'s flag was set meanwhile; EngineFailed: llama.cpp refuses the rows."""
        window, last = self._windows[seq], len(ids) - 1
        if last < 1 or window.end < last or window.first >= last or last >= self._ids.shape[1]:
            return None
        at, memory = self._common(seq, ids, last), lib.llama_get_memory(self._context.owned.pointer)
        if self._begins[seq] < at > window.first:
            lib.llama_memory_seq_rm(memory, seq, at, -1)
        else:
            lib.llama_memory_seq_rm(memory, seq, -1, -1)
            at = self._begins[seq] = self._first(window)
        self._held[seq], most = at, len(self._inputs)
        while at <= last:
            # Without states of all rows the last row goes alone: llama.cpp would return the first row's result.
            n = min(most, last + 1 - at) if self._every else min(most, last - at) or 1
            self._fill(seq, at, n)
            end = at + n
            self._run(seq, at, ids[at:end], outputs=int(end > last))
            self._ids[seq, at:end] = ids[at:end]
            at = self._held[seq] = end
        self._next[seq] = at
        return self._row()

    def follow(self, token: int, seq: int = 0) -> Floats:
        """Return the logits of the token after `token`, which was drafted behind the tokens of the last call."""
        address = self._functions.states(self._context.owned.pointer)
        self._inputs[0] = rows_at(address, self._last_row + 1, self._inputs.shape[1])[self._last_row]
        self._run(seq, self._next[seq], np.array([token], dtype=np.int32), outputs=1)
        self._next[seq] += 1
        return self._row()

    def _common(self, seq: int, ids: Ids, last: int) -> int:
        """Return the position, at most `last`, up to which the speculator's cache is right for `ids`."""
        begin, end = self._begins[seq], min(self._held[seq], last)
        return begin + common_prefix(self._ids[seq, begin:end], ids[begin:end]) if end > begin else begin

    def _run(self, seq: int, start: int, ids: Ids, outputs: int) -> None:
        n = self._batch.put(0, seq, start, ids, outputs)
        self._context.decode(self._native, n)
        self._last_row = n - 1 if self._every else 0

    def _row(self) -> Floats:
        row: Floats = self._context.rows(1)[0]
        return row


@dataclass(frozen=True, slots=True)
class SpeculatorModel:
    """The weights of a speculator, loaded beside a verifier's. With the fault `kind` of `engine.trial.probe` it must
    not be used; `name` tells what drafts. `open` returns a speculator beside a context of the verifier, whose rows'
    states are kept from now on. It raises EngineFailed: llama.cpp cannot reserve the memory."""

    kind: str
    name: str
    open: Callable[[NativeContext, NativeSpec], Speculator]

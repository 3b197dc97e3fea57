"""The layer with which a model predicts further tokens (MTP, next-n; DeepSeek-V3, section 2.2), and its own cache.

llama.cpp computes it in a second context over the same model. Its row for position p takes the token there and the
state after the model's last norm at position p - 1, and predicts the token at p + 1. For a second drafted token its own
state stands in for the model's, and so on.

A `Context` with such a layer hands over the states of all rows that it decodes. The latest `WINDOW` of each sequence
are kept, and the layer reads them when it is first asked for a draft: a reply in which it drafts nothing costs
nothing, and behind a long prompt its attention begins `WINDOW` tokens before the reply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.engine import cores, llama_api, native
from edgellm.engine.llama_api import LlamaBatch, LogitsView
from edgellm.engine.mtp.support import state_functions
from edgellm.engine.native import Stop, lib
from edgellm.engine.vocabulary import Floats, Ids, common_prefix
from edgellm.errors import EngineFailed

WINDOW = 1024
"""States of a sequence that are kept."""
_ROWS = 256  # of a batch of the layer


class StateWindow:
    """The states of the latest positions of one sequence, without a gap: rows for the positions `first` to `end`."""

    def __init__(self, width: int, window: int = WINDOW) -> None:
        self._rows = np.empty((window + max(1, window // 4), width), dtype=np.float32)  # takes memory as it fills
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


class MtpLayer:
    """The MTP layer beside one context. It belongs to the context's thread."""

    def __init__(
        self, model: native.Owned, trunk: native.Owned, *, n_ctx: int, n_seq: int, threads: int, n_vocab: int,
        cache_type: str, flash: bool, all_states: bool,
    ) -> None:  # fmt: skip
        """Open the layer of `model` beside its context `trunk`, which keeps its rows' states from now on. With
        `all_states` the layer's own context gives the states of all rows, else those of rows with logits alone; see
        `STATES_OF_LAST_ROWS`.

        Raises:
            EngineFailed: this llama.cpp exports no functions for it, or cannot reserve the memory.
        """
        functions = state_functions()
        if functions is None:
            raise EngineFailed("This llama.cpp hands over no states.", "Take edgellm's own version.")
        keep, self._states = functions
        self._trunk, self._threads, self._threads_used = trunk, threads, threads
        self._all_states, self._last_row = all_states, 0
        self._width = int(lib.llama_model_n_embd_out(model.pointer))
        rows = min(_ROWS, n_ctx * n_seq)
        self._owned: native.Owned | None = llama_api.open_context(
            model, positions=n_ctx * n_seq, sequences=n_seq, rows=max(rows, n_seq), threads=threads, unified=n_seq == 1,
            cache_type=cache_type, flash_attention=flash, mtp=True,
        )  # fmt: skip
        keep(trunk.pointer, True, False)  # of every row
        keep(self._owned.pointer, True, not all_states)
        self._memory = lib.llama_get_memory(self._owned.pointer)
        self._batch, self._rows = LlamaBatch(max(rows, n_seq), n_ctx), rows
        self._inputs = np.zeros((max(rows, n_seq), self._width), dtype=np.float32)
        self._native = self._batch.with_states(self._inputs)
        self._logits = LogitsView(n_vocab)
        self._windows = [StateWindow(self._width) for _ in range(n_seq)]
        self._ids = np.zeros((n_seq, n_ctx), dtype=np.int32)
        # per sequence: the layer's cache is right for the positions from `begins` to `held`
        self._begins, self._held, self._next = [0] * n_seq, [0] * n_seq, [0] * n_seq

    def close(self) -> None:
        """Close the layer's context; its memory is freed once no view of its logits is left."""
        self._owned = None

    def set_cancel(self, stop: Stop | None) -> None:
        """Have decodes of the layer end early once `stop` is set; see `Context.set_cancel`."""
        if self._owned is not None:
            llama_api.set_cancel(self._owned, stop)

    def note(self, placed: Sequence[tuple[int, int, int, int]]) -> None:
        """Take over the states of the context's last decode; `placed` are (row, sequence, position, rows)."""
        last = max(at + n for at, _, _, n in placed)
        address = self._states(self._trunk.pointer)
        if not address:
            for _, seq, _, _ in placed:
                self.clear(seq)
            return
        buffer: Any = (ctypes.c_float * (last * self._width)).from_address(address)
        states = np.frombuffer(buffer, dtype=np.float32).reshape(last, self._width)
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
        cache; None where their states are not known. The view is valid until the next call.

        Raises:
            Stopped: `set_cancel`'s flag was set meanwhile.
            EngineFailed: llama.cpp refuses the rows.
        """
        window, last = self._windows[seq], len(ids) - 1
        if last < 1 or window.end < last or window.first >= last or last >= self._ids.shape[1]:
            return None
        at = self._common(seq, ids, last)
        if self._begins[seq] < at > window.first:
            lib.llama_memory_seq_rm(self._memory, seq, at, -1)
        else:
            lib.llama_memory_seq_rm(self._memory, seq, -1, -1)
            at = self._begins[seq] = window.first + 1 if window.first else 0
        self._held[seq] = at
        while at <= last:
            # without the states of all rows, the last row alone: with others llama.cpp would give that of the first
            n = min(self._rows, last + 1 - at) if self._all_states else min(self._rows, last - at) or 1
            if at:
                self._inputs[:n] = window.of(at - 1, at - 1 + n)
            else:
                self._inputs[0] = 0.0
                self._inputs[1:n] = window.of(0, n - 1)
            end = at + n
            self._run(seq, at, ids[at:end], outputs=int(end > last))
            self._ids[seq, at:end] = ids[at:end]
            at = self._held[seq] = end
        self._next[seq] = at
        return self._row()

    def follow(self, token: int, seq: int = 0) -> Floats:
        """Return the logits of the token after `token`, which was drafted behind the tokens of the last call. Raises
        what `predict` raises."""
        owned = self._open()
        address = self._states(owned.pointer) + 4 * self._width * self._last_row
        buffer: Any = (ctypes.c_float * self._width).from_address(address)
        self._inputs[0] = np.frombuffer(buffer, dtype=np.float32)
        self._run(seq, self._next[seq], np.array([token], dtype=np.int32), outputs=1)
        self._next[seq] += 1
        return self._row()

    def _common(self, seq: int, ids: Ids, last: int) -> int:
        """Return up to which position, at most `last`, the layer's cache holds what it would have for `ids`."""
        begin, end = self._begins[seq], min(self._held[seq], last)
        return begin + common_prefix(self._ids[seq, begin:end], ids[begin:end]) if end > begin else begin

    def _run(self, seq: int, start: int, ids: Ids, outputs: int) -> None:
        n = self._batch.put(0, seq, start, ids, outputs, False)
        owned = self._open()
        with cores.computation(self._threads) as share:
            if share != self._threads_used:
                llama_api.set_threads(owned, share)
                self._threads_used = share
            llama_api.decode(owned, self._native, n)
        self._last_row = n - 1 if self._all_states else 0

    def _row(self) -> Floats:
        row: Floats = self._logits.rows(self._open(), 1)[0]
        return row

    def _open(self) -> native.Owned:
        if self._owned is None:
            raise EngineFailed("The context is closed.", "Open another.")
        return self._owned

"""The one llama.cpp batch of a context, over arrays that numpy owns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.engine.native import lib
from edgellm.engine.types import Floats, Ids


@dataclass(frozen=True, slots=True)
class SeqRows:
    """Ids to append to sequence `seq`; logits are wanted of the last `outputs` of them."""

    seq: int
    ids: Ids
    outputs: int = 1


def split(rows: Sequence[SeqRows], most: int) -> tuple[list[SeqRows], list[SeqRows]]:
    """Return beginnings of at most `most` ids each, without logits, to be decoded one by one first; and the rest.

    The rest, one entry for each of `rows`, fits one batch of `most` rows. `rows` must ask for at most `most` rows of
    logits in all.
    """
    heads, rest = [], []
    total = sum(len(r.ids) for r in rows)
    for r in rows:
        ids = r.ids
        while total > most and len(ids) > r.outputs:
            size = min(most, len(ids) - r.outputs)
            heads.append(SeqRows(r.seq, ids[:size], 0))
            total -= size
            ids = ids[size:]
        rest.append(SeqRows(r.seq, ids, r.outputs))
    return heads, rest


class LlamaBatch:
    """Room for `n` rows. `tokens` is its native form; `embeddings` makes one that takes float rows instead."""

    def __init__(self, n: int, n_ctx: int) -> None:
        self._ids, self._positions = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
        self._seqs, self._flags = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int8)
        self._ones = np.ones(n, dtype=np.int32)
        self._seq_pointers = (self._seqs.ctypes.data + 4 * np.arange(n)).astype(np.uint64)
        self._count_up = np.arange(n_ctx, dtype=np.int32)
        self.tokens = self._native(self._ids, None)

    def put(self, at: int, seq: int, start: int, ids: Ids, outputs: int, flag_all: bool) -> int:
        """Write `ids` for the positions from `start` on into the rows from `at` on; return the row after them."""
        n = len(ids)
        end = at + n
        self._ids[at:end] = ids
        self._positions[at:end] = self._count_up[start : start + n]
        self._seqs[at:end] = seq
        self._flags[at:end] = flag_all
        self._flags[end - outputs : end] = 1
        return end

    def fill(self, at: int, rows: int, start: int, outputs: int) -> int:
        """Fill the rows from `at` up to `rows` with copies of the row before `at`, for the positions from `start` on.

        The first `outputs` of the copies ask for logits. Return `rows`.
        """
        self._ids[at:rows], self._seqs[at:rows] = self._ids[at - 1], self._seqs[at - 1]
        self._positions[at:rows] = self._count_up[start : start + rows - at]
        self._flags[at:rows] = 0
        self._flags[at : at + outputs] = 1
        return rows

    def embeddings(self, rows: Floats) -> Any:
        """Return a batch of contiguous `rows`, which must outlive its decoding. Positions and flags are shared."""
        return self._native(None, rows)

    def _native(self, ids: Ids | None, rows: Floats | None) -> Any:
        return lib.llama_batch(
            0,
            _pointer(ids, ctypes.c_int32),
            _pointer(rows, ctypes.c_float),
            _pointer(self._positions, ctypes.c_int32),
            _pointer(self._ones, ctypes.c_int32),
            _pointer(self._seq_pointers, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._flags, ctypes.c_int8),
        )


def _pointer(array: npt.NDArray[np.generic] | None, kind: Any) -> Any:
    address: Any = None if array is None else array.ctypes.data
    return ctypes.cast(address, ctypes.POINTER(kind))

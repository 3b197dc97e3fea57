"""Rolling back a sequence: cut the cache, restore a checkpoint, or decode again.

llama.cpp answers `llama_memory_seq_rm` truthfully for plain attention only. A sliding window overwrites cells that a
longer rollback needs, and says that it has none of the window any more only if asked for its least position. A
recurrent state has no past at all but snapshots after each of the last `snapshots` tokens of a sequence's last batch;
a rollback to the start of that batch, or after another rollback, is accepted and leaves a wrong state. So is a rollback
after a batch of other sequences: the states of sequences in one batch are moved side by side, and a state that has to
make room is moved without its snapshots.
"""

import ctypes
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engine import native
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.llama_api import NativeContext
from edgellm.engine.native import lib
from edgellm.engine.vocabulary import Ids
from edgellm.errors import ModelUnsupported

MAX_SNAPSHOTS = 8
"""Most tokens of a batch that can be rolled back at once: a draft model's chunk."""
_PARTIAL = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # a recurrent state or a window's cells, which cannot be cut
_ANCHOR = 32  # least tokens between a kept checkpoint and the next
_ANCHORS = 4
_MOST_BYTES = 2**28  # limit of a checkpoint, and of a sequence's checkpoints beyond two
_HEADING, _OF_A_CELL = 2**14, 16  # bytes of a checkpoint beside its states: once, and for each cell
_NEVER = 2**31  # greater than any position
_COPIED_LATE = frozenset({"deepseek4"})
"""Architectures whose compressed states llama.cpp copies only with the next batch, when they may be cleared."""
_APART = frozenset({"plamo2"})
"""Architectures of which llama.cpp computes several sequences in one batch wrongly."""

_STATE = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32)
_get_state = native.bind(lib.llama_state_seq_get_data_ext, *_STATE)
_set_state = native.bind(lib.llama_state_seq_set_data_ext, *_STATE)
_FILE = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t)
_save_file = native.bind(lib.llama_state_seq_save_file, *_FILE)
_load_file = native.bind(lib.llama_state_seq_load_file, *_FILE, ctypes.POINTER(ctypes.c_size_t))


def snapshots_that_fit(header: GgufHeader, n_seq: int) -> int:
    """Return how many snapshots of a recurrent state, `MAX_SNAPSHOTS` at most, take for `n_seq` sequences no more than
    an eighth of the model's file; 0 without such a state."""
    state = header.recurrent_state_bytes
    return min(MAX_SNAPSHOTS, header.file_size // 8 // (state * n_seq)) if state else 0


def checkpoint_bytes(header: GgufHeader, n_ctx: int, n_seq: int) -> int:
    """Return the most bytes of this machine's memory for checkpoints of `n_seq` sequences of `n_ctx` positions; 0 where
    all can be cut by positions."""
    state, window = header.recurrent_state_bytes, header.number("attention.sliding_window")
    recurrent = state > 0 or header.architecture in _COPIED_LATE
    if recurrent and state > _MOST_BYTES:
        return 0
    # A state of a size that the header does not tell is no larger than all keys and values.
    cells = n_ctx if recurrent and not state else min(window, n_ctx)
    if not recurrent and not cells:
        return 0
    size = 2 if header.is_f32 else 1
    one = state * recurrent + cells * (size * header.cache_bytes_per_token + _OF_A_CELL) + _HEADING
    one = min(one, _MOST_BYTES)
    each = max(2 * one, min((1 + _ANCHORS) * one, _MOST_BYTES))
    return n_seq * each + one  # a new checkpoint is saved before its predecessor is dropped


_seq_rm = native.bind_nonblocking(
    lib.llama_memory_seq_rm, ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
)


@dataclass(slots=True)
class _Checkpoint:
    length: int
    state: Any
    """A ctypes buffer."""
    likely: bool = False
    """The sequence begins there, or a text took the place of another: the next one may well do the same."""


@dataclass(slots=True)
class _Sequence:
    """A sequence's checkpoints: `newest`, and `anchors` at ends of long reads, in ascending order. `batch`: the length
    before the last batch, above which all snapshots lie."""

    batch: int = 0
    pending: bool = False
    fresh: bool = True
    """The text that is read begins the sequence, or takes the place of another one with anchors."""
    due: bool = False
    """A checkpoint is due before the next single token."""
    newest: _Checkpoint | None = None
    anchors: list[_Checkpoint] = field(default_factory=list)

    def at_most(self, length: int) -> _Checkpoint | None:
        """Return the longest checkpoint of at most `length` positions."""
        known = [one for one in (*self.anchors, self.newest) if one is not None and one.length <= length]
        return max(known, key=lambda one: one.length, default=None)

    def forget_after(self, length: int) -> None:
        """Drop the checkpoints of more than `length` positions: their tokens have changed."""
        known = [one for one in self.anchors if one.length <= length]
        self.fresh, self.anchors = self.fresh or len(known) < len(self.anchors), known
        if self.newest is not None and self.newest.length > length:
            self.newest = None


class KVCache:
    """The cache of an open context of `n_seq` sequences over a model.

    `window` is the size of the model's sliding window, 0 without one. `recurrent`: at least some layers keep a state
    that is not cut by positions.
    """

    def __init__(
        self, model: native.Owned, context: NativeContext, n_seq: int, architecture: str, *, whole_window: bool = False
    ) -> None:
        """Manage the cache of `context`. With a `whole_window` it keeps all positions, whatever a layer attends to.
        Raises ModelUnsupported: the model keeps no cache."""
        self._copies, self._shares = architecture not in _COPIED_LATE, architecture not in _APART
        self._context = context
        self._memory: int = lib.llama_get_memory(context.owned.pointer)
        if not self._memory:
            raise ModelUnsupported("The model keeps no cache.", "Use a model that generates text.")
        self.recurrent = bool(lib.llama_model_is_recurrent(model.pointer) or lib.llama_model_is_hybrid(model.pointer))
        self.window = 0 if whole_window else max(0, int(lib.llama_model_n_swa(model.pointer)))
        self.snapshots = int(lib.llama_n_rs_seq(context.owned.pointer)) if self.recurrent else 0
        self._sequences = [_Sequence() for _ in range(n_seq)]

    def close(self) -> None:
        """Release all checkpoints."""
        self._sequences = []

    @property
    def plain(self) -> bool:
        """Return whether every rollback is exact, and takes no time."""
        return not self.recurrent and not self.window

    def clear(self, seq: int) -> int:
        """Empty a sequence; return its new length, 0."""
        self._sequences[seq] = _Sequence()
        _seq_rm(self._memory, seq, -1, -1)
        return 0

    def truncate(self, seq: int, length: int, now: int) -> int:
        """Roll a sequence of `now` positions back to `length`; return its new length: less than `length` if the rest
        has to be read again."""
        if self.plain:
            return length if _seq_rm(self._memory, seq, length, -1) else self.clear(seq)
        one = self._sequences[seq]
        if length == 0:
            return self.clear(seq)
        one.forget_after(length)
        if self._cut(seq, one, length, now):
            return length
        return self._restored(seq, one, length)

    def _cut(self, seq: int, one: _Sequence, length: int, now: int) -> bool:
        """Drop the positions from `length` on; return whether the rest is right."""
        if self.recurrent and (one.pending or length <= one.batch or now - length > self.snapshots):
            return False
        if not _seq_rm(self._memory, seq, length, -1):
            return False
        one.pending = self.recurrent
        return not self.window or self._least(seq) <= max(0, length - self.window)

    def _least(self, seq: int) -> int:
        """Return the position from which on a sequence has all its cells; above all positions if it has none."""
        least = int(lib.llama_memory_seq_pos_min(self._memory, seq))
        return least if least >= 0 else _NEVER

    def _restored(self, seq: int, one: _Sequence, length: int) -> int:
        """Restore the longest checkpoint of at most `length` positions; return its length."""
        found = one.at_most(length)
        if found is None:
            return self.clear(seq)
        context = self._context.owned
        with context.guard:
            taken = _set_state(context.pointer, found.state, len(found.state), seq, _PARTIAL)
        if not taken or not _seq_rm(self._memory, seq, found.length, -1):
            return self.clear(seq)
        one.batch, one.pending = found.length, False
        return found.length

    def settle(self, seq: int, length: int) -> int:
        """Restore a checkpoint if a rollback to `length` positions waits for the next batch; return the length."""
        one = self._sequences[seq]
        return self._restored(seq, one, length) if one.pending else length

    def size(self, seq: int) -> int:
        """Return the bytes of a sequence's whole state."""
        return int(lib.llama_state_seq_get_size_ext(self._context.owned.pointer, seq, 0))

    def save_file(self, seq: int, ids: Ids, path: Path) -> bool:
        """Write a sequence and its `ids` (n,) to a file; return whether that was possible."""
        if self._sequences[seq].pending:  # the state is from before the rollback: see `settle`
            return False
        context = self._context.owned
        with context.guard:
            return bool(_save_file(context.pointer, os.fsencode(path), seq, ids.ctypes.data, len(ids)))

    def load_file(self, seq: int, path: Path, most: int) -> Ids | None:
        """Load a sequence of at most `most` ids from a file; return its ids, or None, with the sequence empty, if the
        file is of another kind of context."""
        self.clear(seq)
        context, ids, count = self._context.owned, np.empty(most, dtype=np.int32), ctypes.c_size_t()
        with context.guard:
            taken = _load_file(context.pointer, os.fsencode(path), seq, ids.ctypes.data, most, ctypes.byref(count))
        if not taken:
            self.clear(seq)
            return None
        self._sequences[seq].batch = count.value
        return ids[: count.value]

    def copy(self, src: int, dst: int) -> bool:
        """Make `dst` a copy of `src`; return False where that is impossible, with `dst` empty."""
        self.clear(dst)
        one = self._sequences[src]
        if one.pending or not self._copies:  # pending: the copy would have the state before the rollback
            return False
        lib.llama_memory_seq_cp(self._memory, src, dst, -1, -1)
        one.batch = _NEVER  # both share a state until their next batches: a rollback would move both
        self._sequences[dst] = _Sequence(_NEVER, newest=one.newest, anchors=list(one.anchors))
        return True

    def distrust(self, seq: int, length: int, now: int) -> int:
        """Roll back like `truncate` after a batch that has failed or was interrupted."""
        self._sequences[seq].batch = _NEVER
        return self.truncate(seq, length, now)

    def expect_draft(self, seq: int) -> None:
        """Save a checkpoint of a recurrent sequence before its next single token, unless there are snapshots. Tokens
        that are decoded one by one may be rolled back together, and a snapshot gives back the last batch only."""
        self._sequences[seq].due = self.recurrent and not self.snapshots

    def begin_batch(self, seq: int, start: int, rows: int, outputs: int) -> None:
        """Record that a batch follows with `rows` rows of a recurrent sequence from position `start` on. All but one of
        its last `outputs` rows may be rolled back: with fewer snapshots, save a checkpoint."""
        one = self._sequences[seq]
        if outputs - 1 > self.snapshots or (rows == 1 and one.due):
            self.save(seq, start)
            one.due = False
        elif rows > 1:
            self.expect_draft(seq)
        one.batch, one.pending = start, False

    def may_share(self, rows: Mapping[int, int]) -> bool:
        """Return whether sequences with these numbers of rows may be computed in one batch: with snapshots, only if
        llama.cpp does not divide it. The second part could move states of the first, without their snapshots."""
        seqs = list(rows)
        adjacent = len(set(rows.values())) == 1 and seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        return self._shares and (adjacent or not self.snapshots)

    def begin_shared_batch(self, seqs: Collection[int]) -> None:
        """Record that a batch of these sequences follows: if several, all other sequences lose their snapshots."""
        if self.snapshots and len(seqs) > 1:
            for seq, one in enumerate(self._sequences):
                if seq not in seqs:
                    one.batch = _NEVER

    def begin_read(self, seq: int) -> None:
        """Record that another text is read, before the sequence is rolled back to what both have."""
        self._sequences[seq].fresh = not self._sequences[seq].anchors

    def save(self, seq: int, length: int, *, border: bool = False) -> None:
        """Save a checkpoint of a sequence of `length` positions, perhaps at a `border` of turns. The oldest of too many
        goes that is not likely to be needed, else the second."""
        one, context = self._sequences[seq], self._context.owned
        if not length or ((last := one.at_most(length)) is not None and last.length == length):
            return
        size = lib.llama_state_seq_get_size_ext(context.pointer, seq, _PARTIAL)
        if not 0 < size <= _MOST_BYTES:
            return
        state = (ctypes.c_uint8 * size)()
        with context.guard:
            if _get_state(context.pointer, state, size, seq, _PARTIAL) != size:
                return
        new = _Checkpoint(length, state, border and one.fresh)
        if border or last is None or length - last.length >= _ANCHOR:
            known, one.anchors = one.anchors, [*one.anchors, new]
            if len(one.anchors) > min(_ANCHORS, max(1, _MOST_BYTES // size - 1)):  # beside the newest checkpoint
                needless = (number for number, old in enumerate(known) if not old.likely)
                del one.anchors[next(needless, min(1, len(known) - 1))]
        else:
            one.newest = new

"""A context's cache: the ids in its sequences, and how they are rolled back, branched and synchronised."""

from __future__ import annotations

from edgellm.engine import native
from edgellm.engine.decoding.sequences import Sequences
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.engine.types import Ids
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported


class Cache:
    """`n_seq` sequences of up to `n_ctx` positions each; `unified` where all are in one buffer."""

    def __init__(self, model: Model, n_ctx: int, n_seq: int, unified: bool) -> None:
        self.model, self.n_ctx, self.n_seq, self.unified = model, n_ctx, n_seq, unified
        self._owned: native.Owned | None = None
        self._sequences = Sequences(n_seq, n_ctx)
        self._lengths = self._sequences.lengths

    def cached(self, seq: int = 0) -> Ids:
        """Return the ids in a sequence's cache, shape (length,), as a read-only view until the sequence changes."""
        return self._sequences.view(seq)

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._lengths[self._sequences.known(seq)]

    def rollback(self, length: int, seq: int = 0) -> None:
        """Drop all but the first `length` positions of a sequence.

        Raises:
            InvalidOption: the sequence is shorter than that.
            ModelUnsupported: the model's state is recurrent and can only be dropped whole, which has been done.
        """
        self._open()
        now = self.length(seq)
        if not 0 <= length <= now:
            raise InvalidOption(f"Cannot roll back to {length} positions.", f"The sequence has {now}.")
        if length == now:
            return
        self._lengths[seq] = length
        if not self._forget(seq, length):
            self.clear(seq)
            raise ModelUnsupported(
                f"{self.model.name} cannot forget single tokens: its state is recurrent.", "Use a transformer model."
            )

    def branch(self, src: int, dst: int) -> None:
        """Make sequence `dst` a copy of `src`; no keys or values are copied.

        Raises:
            InvalidOption: the context is not unified, or a sequence does not exist.
        """
        if not self.unified:
            raise InvalidOption("Sequences of a context with separate buffers cannot branch.", "Open it unified.")
        native_context = self._open()
        if self._sequences.known(src) == dst:
            return
        self.clear(dst)
        lib.llama_memory_seq_cp(lib.llama_get_memory(native_context.pointer), src, dst, -1, -1)
        self._sequences.copy(src, dst)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Copy the first `length` positions of `src` to sequence `dst`, without computing them; also across buffers.

        llama.cpp copies separate buffers only whole, when it next decodes; so this pays for long prefixes only.

        Raises:
            InvalidOption: `src` is shorter than that, or a sequence does not exist.
            ModelUnsupported: the model's state is recurrent, and has no beginning to be copied; `dst` is empty then.
        """
        memory = lib.llama_get_memory(self._open().pointer)
        if not 0 <= length <= self.length(src):
            raise InvalidOption(f"Cannot copy {length} positions.", f"The sequence has {self.length(src)}.")
        if self._sequences.known(dst) != src:
            self.clear(dst)
            lib.llama_memory_seq_cp(memory, src, dst, -1, -1)
            self._sequences.copy(src, dst)
        self.rollback(length, dst)

    def clear(self, seq: int = 0) -> None:
        """Empty a sequence."""
        self._lengths[self._sequences.known(seq)] = 0
        self._forget(seq, -1)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        """Roll back to the common prefix of the cache and `ids`, at most all ids but the last; return its length.

        Decoding `ids[length:]` then completes the cache and gives fresh logits for the last id.

        Raises:
            InvalidOption: no ids.
        """
        if len(ids) == 0:
            raise InvalidOption("There are no ids to bring the cache in line with.", "Give at least one.")
        common = self._sequences.common(seq, ids[:-1])
        self.rollback(common, seq)
        return common

    def _open(self) -> native.Owned:
        if self._owned is None:
            raise EngineFailed("The context is closed.", "Open another.")
        native.ending.pass_by()
        return self._owned

    def _forget(self, seq: int, start: int) -> bool:
        """Drop the cache of a sequence from `start` on (all of it where -1); return False where that is impossible."""
        native_context = self._open()
        return bool(lib.llama_memory_seq_rm(lib.llama_get_memory(native_context.pointer), seq, start, -1))

    def _restore(self, starts: dict[int, int]) -> None:
        for seq, start in starts.items():
            self._lengths[seq] = start
            if self._owned is not None:  # it may have been closed from elsewhere
                self._forget(seq, start)

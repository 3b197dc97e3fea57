"""The sequences of a context: their ids, their keys and values in a cache, and those that are kept on disk."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgellm.engine import native
from edgellm.engine.kv.kv_cache import KVCache
from edgellm.engine.kv.saved_prompts import LEAST, SavedPrompts
from edgellm.engine.vocabulary import Floats, Ids, common_prefix
from edgellm.errors import ContextFull, InvalidOption, ModelUnsupported

if TYPE_CHECKING:
    from edgellm.engine.llama_api import NativeContext, NativeSpec
    from edgellm.engine.model import Model
    from edgellm.engine.speculators.speculator import Speculator

NO_ID = -1
"""The id of a position that an embedding row filled instead of a token."""


class Sequences:
    """`n_seq` sequences of at most `n_ctx` ids, numbered from 0."""

    def __init__(self, n_seq: int, n_ctx: int) -> None:
        self._n_ctx = n_ctx
        self._ids = np.zeros((n_seq, n_ctx), dtype=np.int32)
        self.lengths = [0] * n_seq

    def check_fits(self, seq: int, n: int) -> int:
        """Return the length of a sequence if `n` more ids fit; raise ContextFull otherwise."""
        length = self.lengths[seq]
        if length + n > self._n_ctx:
            raise ContextFull(
                f"{length} of {self._n_ctx} positions are taken; {n} more do not fit.",
                "Shorten the conversation, or open a longer context.",
            )
        return length

    def view(self, seq: int) -> Ids:
        """Return the ids of a sequence, read-only."""
        view = self._ids[seq, : self.lengths[seq]]
        view.flags.writeable = False
        return view

    def note(self, seq: int, ids: Ids) -> int:
        """Write ids after the end of a sequence, and return its length, which grows only once they are decoded."""
        start = self.lengths[seq]
        self._ids[seq, start : start + len(ids)] = ids
        return start

    def copy(self, src: int, dst: int) -> None:
        """Make `dst` equal to `src`."""
        n = self.lengths[src]
        self._ids[dst, :n] = self._ids[src, :n]
        self.lengths[dst] = n

    def common(self, seq: int, ids: Ids) -> int:
        """Return how many ids a sequence and `ids` share from the start."""
        return common_prefix(self._ids[seq, : self.lengths[seq]], ids)


@dataclass(frozen=True, slots=True)
class SeqRows:
    """Ids to append to sequence `seq`; logits are wanted of the last `outputs` of them. Float32 rows (n, n_embd) may be
    `embedded` in place of ids, which are then `NO_ID`, as they enter the first layer."""

    seq: int
    ids: Ids
    outputs: int = 1
    embedded: Floats | None = None

    def part(self, start: int, end: int, outputs: int) -> "SeqRows":
        """Return the rows from `start` up to before `end`."""
        return SeqRows(
            self.seq, self.ids[start:end], outputs, None if self.embedded is None else self.embedded[start:end]
        )


def split(rows: Sequence[SeqRows], most: int, borders: Sequence[int] = ()) -> tuple[list[SeqRows], list[SeqRows]]:
    """Return the earlier rows in parts of at most `most` ids, without logits, to be decoded one by one; and the rest.
    Of a single entry some parts end at the `borders`.

    The rest, one entry for each of `rows`, fits one batch of `most` rows. `rows` must ask for at most `most` rows of
    logits in all.
    """
    earlier, rest = [], []
    total = sum(len(r.ids) for r in rows)
    for r in rows:
        at, n = 0, len(r.ids)
        while (border := next((one for one in borders if one > at), 0)) or (total > most and n - at > r.outputs):
            size = min(most, (border or n - r.outputs) - at)
            earlier.append(r.part(at, at + size, 0))
            total, at = total - size, at + size
        rest.append(r.part(at, n, r.outputs))
    return earlier, rest


class CachedSequences(ABC):
    """Sequences whose keys and values are in the cache of a native context: rolled back, copied, branched, kept on
    disk. Positions that a recurrent state or a sliding window has lost are read again before the next decode."""

    speculator: "Speculator | None" = None
    """The speculator that drafts from the states of these sequences."""

    def __init__(
        self, model: "Model", spec: "NativeSpec", context: "NativeContext", saved_prompts: SavedPrompts | None
    ) -> None:
        """Manage the cache of `context`. Raises ModelUnsupported: the model has no key-value cache."""
        self.model, self.native_spec, self.native = model, spec, context
        self.n_ctx, self.n_seq, self.n_batch = spec.n_ctx, spec.sequences, spec.rows
        """Positions of a sequence, sequences, and rows of a batch."""
        self._cache = KVCache(
            model.owned, context, spec.sequences, model.header.architecture, whole_window=spec.whole_window
        )
        self._saved_prompts, self._sequences = saved_prompts, Sequences(spec.sequences, spec.n_ctx)
        self._epochs = [0 if saved_prompts is None else saved_prompts.epoch] * spec.sequences
        self._held: dict[int, int] = {}  # positions that the cache still has of sequences whose rest must be read again

    @abstractmethod
    def _read(self, part: SeqRows) -> None:
        """Compute rows, at most a batch of them, behind the end of a sequence."""

    @property
    def recurrent(self) -> bool:
        """True if at least some layers keep a state that is not cut by positions."""
        return self._cache.recurrent

    def _kind(self) -> str:
        """Return a name for all that a sequence's state depends on."""
        spec, model = self.native_spec, self.model
        by_length = any("rope_factors_long" in tensor.name for tensor in model.header.tensors)
        context = f"{native.commit()} {spec.cache_type} {spec.flash} {spec.n_ctx if by_length else ''}"
        return f"{model.loaded_from}\n{context}"

    def cached(self, seq: int = 0) -> Ids:
        """Return the ids in a sequence's cache, shape (length,), as a read-only view until the sequence changes."""
        return self._sequences.view(seq)

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._sequences.lengths[seq]

    def rollback(self, length: int, seq: int = 0) -> None:
        """Drop all but the first `length` positions of a sequence. Positions that a recurrent state or a sliding window
        has lost are read again before the next decode. Raises InvalidOption: the sequence is shorter than that."""
        self.native.check_open()
        now = self.length(seq)
        if not 0 <= length <= now:
            raise InvalidOption(f"Cannot roll back to {length} positions.", f"The sequence has {now}.")
        if length == now:
            return
        self._sequences.lengths[seq] = length
        if self.speculator is not None:
            self.speculator.truncate(seq, length)
        if seq in self._held:
            now = self._held.pop(seq)
            if now <= length:
                self._lose(seq, now, length)
                return
        self._lose(seq, self._cache.truncate(seq, length, now), length)

    def _lose(self, seq: int, held: int, length: int) -> None:
        """Note that the cache has `held` of a sequence's `length` positions."""
        if held < length:
            self._held[seq] = held

    def reread(self, seq: int = 0) -> None:
        """Read again the positions that a rollback has lost. Decodes do so themselves."""
        lengths = self._sequences.lengths
        held, length = self._held.pop(seq, None), lengths[seq]
        if held is None:
            return
        ids = self._sequences.view(seq)[held:length].copy()
        if (ids == NO_ID).any():
            self.clear(seq)
            raise ModelUnsupported(
                f"{self.model.name} cannot remove embedding rows from its recurrent state.", "Use a transformer model."
            )
        lengths[seq] = held
        try:
            for start in range(0, len(ids), self.n_batch):
                self._read(SeqRows(seq, ids[start : start + self.n_batch], 0))
        except BaseException:
            now, lengths[seq] = lengths[seq], length
            self._lose(seq, self._cache.distrust(seq, now, now), length)
            raise

    def branch(self, src: int, dst: int) -> None:
        """Make sequence `dst` a copy of `src`, which is read again if need be; in a unified context no keys or values
        are copied."""
        length = self.length(src)
        self.reread(src)
        self.copy_prefix(src, dst, length)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Copy the first `length` positions of `src` to sequence `dst`, without computing them; also across buffers.

        llama.cpp copies separate buffers only whole, when it next decodes; so this pays for long prefixes only.
        """
        self.native.check_open()
        if dst != src:
            self._held.pop(dst, None)
            if self.speculator is not None:
                self.speculator.clear(dst)
            copied, whole = self._cache.copy(src, dst), self.length(src)
            self._sequences.copy(src, dst)
            self._lose(dst, self._held.get(src, whole) if copied else 0, whole)
        self.rollback(length, dst)

    def save(self, path: Path, seq: int = 0) -> bool:
        """Write a sequence to a file, with its ids; return whether that was possible."""
        return seq not in self._held and self._cache.save_file(seq, self.cached(seq), path)

    def load(self, path: Path, seq: int = 0) -> int:
        """Load a sequence from a file of `save`, which must be known to be whole; return its length: 0, with the
        sequence empty, if the file is of another kind of context."""
        self.clear(seq)
        ids = self._cache.load_file(seq, path, self.n_ctx)
        if ids is None:
            return 0
        self._sequences.note(seq, ids)
        self._sequences.lengths[seq] = len(ids)
        return len(ids)

    def clear(self, seq: int = 0) -> None:
        """Empty a sequence."""
        self._sequences.lengths[seq] = 0
        self._held.pop(seq, None)
        if self.speculator is not None:
            self.speculator.clear(seq)
        self.native.check_open()
        self._cache.clear(seq)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        """Roll back to the common prefix of the cache and `ids`, at most all ids but the last; return its length, or a
        shorter length where the rest has to be read again.

        Decoding `ids[length:]` then completes the cache and gives fresh logits for the last id.
        """
        common = self._sequences.common(seq, ids[:-1])
        self.native.check_open()
        self._cache.begin_read(seq)
        if seq in self._savable and self._saved_prompts is not None:
            common = self._from_disk(self._saved_prompts, ids[:-1], common, seq)
        self.rollback(common, seq)
        if seq in self._held:
            self._sequences.lengths[seq] = common = self._held.pop(seq)
        self._cache.expect_draft(seq)
        return common

    @property
    def _savable(self) -> range:
        """Return the sequences that can be saved to disk: the first, and all whose cells are their own. None where
        passes are padded and the model has a sliding window: a file holds only the cells within it, a restored sequence
        has them at other places of the buffer, and there sums are rounded differently."""
        if self.native_spec.padding is not None and self.model.window:
            return range(0)
        return range(1 if self.native_spec.unified else self.n_seq)

    def _from_disk(self, saved_prompts: SavedPrompts, ids: Ids, common: int, seq: int) -> int:
        """Load a sequence from disk that shares more of `ids` (n,) than the `common` first ids, if that saves reading;
        return how many ids are common then."""
        self._epochs[seq] = saved_prompts.epoch  # the new contents belong to this epoch
        if len(ids) - common < LEAST:
            return common
        found = saved_prompts.find(self._kind(), ids, common + LEAST - 1, whole=not self._cache.plain)
        if found is None:
            return common
        self.load(found, seq)
        return self._sequences.common(seq, ids)

    def _to_disk(self, saved_prompts: SavedPrompts, seq: int) -> None:
        """Keep a sequence on disk if that may save reading."""
        lengths = self._sequences.lengths
        lengths[seq] = self._cache.settle(seq, self._held.pop(seq, lengths[seq]))
        ids = self.cached(seq)
        if len(ids) >= LEAST and self._epochs[seq] == saved_prompts.epoch and not (ids == NO_ID).any():
            write = partial(self.save, seq=seq)
            saved_prompts.keep(self._kind(), ids, self._cache.size(seq), write, whole=not self._cache.plain)

    def _undo(self, starts: dict[int, int]) -> None:
        """Cut sequences to their lengths before a failed decode."""
        for seq, start in starts.items():
            now, self._sequences.lengths[seq] = self._sequences.lengths[seq], start
            if self.speculator is not None:
                self.speculator.truncate(seq, start)
            if not self.native.closed:  # another thread may have closed the context
                self._held.pop(seq, None)
                self._lose(seq, self._cache.distrust(seq, start, now), start)

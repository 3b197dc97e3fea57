"""A key-value cache over a model: decode, roll back, branch.

A decode costs a few microseconds more than llama.cpp's own, because more would show at the speed of a tiny model: one
batch whose arrays are numpy's, one numpy view over the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np

from edgellm.engine import cores, llama_api, native
from edgellm.engine.gguf.cuttable import row_factor
from edgellm.engine.gguf.overheads import output_rows
from edgellm.engine.graph_hooks import Capture, Recorder, attention_rows
from edgellm.engine.hardware import DEFAULT_CACHE, N_BATCH, QUANTISED
from edgellm.engine.kv.kv_cache import KVCache, checkpoint_bytes, snapshots_that_fit
from edgellm.engine.kv.layer_rows import LayerRows
from edgellm.engine.kv.prompt_cache import CachedSequence, PromptCache
from edgellm.engine.kv.sequences import NO_ID, SeqRows, Sequences, split
from edgellm.engine.llama_api import LlamaBatch, LogitsView
from edgellm.engine.lm_head import ROWS, LazyHead, LazyLogits, LMHead, Rows
from edgellm.engine.model import Model
from edgellm.engine.native import Stop
from edgellm.engine.speculators.speculator import Speculator, Trunk
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import ContextFull, EngineFailed, InvalidOption, ModelUnsupported, Stopped

_NO_OBSERVER = nullcontext()


def _cache_type(wanted: str | None, exact: bool, flash: bool) -> str:
    """Return the type of keys and values: without flash attention, llama.cpp has no quantised values."""
    return "f32" if exact else DEFAULT_CACHE if wanted is None or (wanted in QUANTISED and not flash) else wanted


class Context:
    """`n_seq` sequences of up to `n_ctx` positions each, decoded by one model. For one thread at a time.

    `unified`: one buffer for all sequences, in which branching copies nothing; without it each has its own, which is
    faster for many unrelated sessions. With `spare` a unified buffer has `n_ctx + spare` cells instead of room for all
    sequences in full: enough for one sequence and its branches, which share its cells. `threads` defaults to the
    physical cores that this process may use, and to one for a tiny model; a decode uses its share of the cores while
    other threads compute, see `threads_used`. `exact` keeps the cache in float32 and does without flash attention, so
    that logits do not depend on how the ids were batched (1e-5 of the largest; flash attention on a CPU rounds to 16
    bits, and differently for other batch sizes and, with single rows, for other numbers of threads: 1e-3). It defaults
    to True for a model in float32 and False otherwise. Without flash attention a single token of a small model is
    decoded beside a copy of itself, which is dropped at once: llama.cpp has a fast attention for two rows and more.
    Logits are views into llama.cpp's buffer: copy any that must outlive the next decode.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq: int = 1,
        n_batch: int | None = None,
        threads: int | None = None,
        unified: bool = True,
        spare: int | None = None,
        capture: Capture | None = None,
        exact: bool | None = None,
        flash: bool | None = None,
        lazy: bool = False,
        rolls_back: bool = False,
        speculates: bool = False,
        whole_window: bool = False,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Reserve the cache. What is not given is as the model's `hardware` says, or else by default: batches of
        `N_BATCH` rows, and `flash` attention where it pays and is possible.

        `rolls_back`: where the model's state is recurrent, keep snapshots of it, so that drafted tokens at the end of a
        batch can be rolled back at once. Otherwise checkpoints are saved to roll back to.

        With `speculates` the model's `speculator` is opened beside it, if it has one.

        `whole_window`: keep all positions of a sliding window, so that rows can be rolled back, which cannot be read
        again.

        What a `prompt_cache` has of the ids with which the first sequence is synced need not be read again; what the
        sequence holds when the context is closed is kept there.

        Where attention is captured, batches have as many rows as keep its scores within `SCORES` bytes, at least 32:
        without flash attention each row has one for every head and position.

        With `lazy` it can decode lazily, if the model's head can be computed alone and nothing is captured; a pass
        then takes 1% longer.

        Raises:
            InvalidOption: a size that is not positive, too many sequences, fewer rows in a batch than sequences (where
                llama.cpp would abort), spare cells for separate buffers, a layer to capture that does not exist.
            EngineFailed: llama.cpp cannot reserve it, for want of memory above all.
        """
        hardware = model.hardware
        n_batch = max(n_seq, hardware.n_batch or N_BATCH) if n_batch is None else n_batch
        llama_api.check_sizes(n_ctx, n_seq, n_batch, threads, unified, spare)
        if capture is not None:
            capture.check(model.n_layer)
        self.model, self.n_ctx, self.n_seq, self.unified = model, n_ctx, n_seq, unified
        self._owned: native.Owned | None = None
        self._sequences = Sequences(n_seq, n_ctx)
        self._lengths = self._sequences.lengths
        cells = n_ctx * n_seq if spare is None else min(n_ctx + spare, n_ctx * n_seq)
        if capture is not None and capture.attention:
            n_batch = min(n_batch, attention_rows(model.header, cells))
        self.n_batch = max(n_seq, min(n_batch, cells))
        self.threads = self.threads_used = threads or hardware.threads or native.default_threads(model.n_params)
        """Threads of a decode that is alone, and of the last decode: fewer if others computed at the same time."""
        self.shared = 0
        """Decodes that had fewer threads than a decode that is alone."""
        self.exact = model.is_f32 if exact is None else exact
        flash = hardware.flash_attn if flash is None else flash
        quantised = hardware.cache_type in QUANTISED and not self.exact
        flash = (
            quantised or native.flash_pays(model.n_params, self.n_batch, model.offloaded) if flash is None else flash
        )
        self.flash = flash and not self.exact and not (capture and capture.attention)
        self.captured = None if capture is None else Recorder(capture, n_seq, unified)
        head = LMHead.open(model, self.threads) if lazy and capture is None else None
        self._lazy_head = None if head is None else LazyHead(head)
        observer = self.captured or self._lazy_head
        cache_type = _cache_type(hardware.cache_type, self.exact, self.flash)
        self._saved: CachedSequence | None = None
        if prompt_cache is not None:
            by_length = any("rope_factors_long" in tensor.name for tensor in model.header.tensors)
            kind = f"{native.commit()} {cache_type} {self.flash} {n_ctx if by_length else ''}"
            self._saved = CachedSequence(prompt_cache, kind)
        self._owned = llama_api.open_context(
            model.owned,
            positions=cells,
            sequences=n_seq,
            rows=self.n_batch,
            threads=self.threads,
            unified=unified,
            cache_type=cache_type,
            callback=observer and observer.callback,
            flash_attention=self.flash,
            snapshots=snapshots_that_fit(model.header, model.size_bytes, n_seq) if rolls_back else 0,
            whole_window=whole_window,
            outputs=output_rows(n_seq, self.n_batch) if model.few_outputs and not (capture and capture.outputs) else 0,
        )
        self._cache = KVCache(
            model.owned, self._owned, n_seq, model.architecture, trusted="rollback" not in model.faults,
            whole_window=whole_window,
        )  # fmt: skip
        self._placed: list[tuple[int, int, int, int]] = []  # rows of the batch, for the speculator
        self._speculator = self._open_speculator() if speculates and capture is None else None
        self._lost: dict[int, int] = {}  # sequences whose last positions must be read again, and how many they have
        if not self._cache.exists:
            raise ModelUnsupported(f"{model.name} keeps no cache.", "Use a model that generates text.")
        self._logits = LogitsView(model.n_vocab)
        self._should_stop: Callable[[], bool] | None = None
        self._progress: Callable[[int, int], None] | None = None
        self._batch = LlamaBatch(self.n_batch, n_ctx, planes=model.position_planes)
        self._row_factor = row_factor(model.header)
        outer = None if capture is None else {capture.stop_after, *capture.outputs}
        # the last layer's output holds only the rows of which logits are wanted
        self._flag_all = bool(outer and model.n_layer - 1 in outer)
        self._plain = not self._flag_all and (capture is None or capture.stop_after is None)
        rows_only = capture is None or not (capture.outputs or (self.captured and self.captured.stops))
        small = not self.flash and not self.exact and native.is_small(model.n_params)
        self._pairs = rows_only and small and not self._cache.recurrent
        self._widths: Sequence[int] = ()

    @property
    def _one_at_a_time(self) -> bool:
        return "sequences" in self.model.faults

    @property
    def _row_by_row(self) -> bool:
        return "rows" in self.model.faults

    @property
    def lazy_head(self) -> LazyHead | None:
        """Return the source of lazy logits for `decode_lazy`; None if all logits are computed at once."""
        return None if self.model.head_is_plain is False or self._row_by_row else self._lazy_head

    @property
    def snapshots(self) -> int:
        """Return how many tokens at the end of a batch can be rolled back by snapshots of a recurrent state."""
        return self._cache.snapshots

    @property
    def checkpoint_bytes(self) -> int:
        """Return at most how many bytes of this machine's memory the checkpoints to roll back to take."""
        cache = self._cache
        return checkpoint_bytes(
            self.model.header, self.n_ctx, self.n_seq, recurrent=cache.recurrent, window=cache.window
        )

    def _open_speculator(self) -> Speculator | None:
        if self.model.speculator is None:
            return None
        cache_type = _cache_type(self.model.hardware.cache_type, self.exact, self.flash)
        return self.model.speculator.open(
            Trunk(self._open(), self.n_ctx, self.n_seq, self.threads, self.model.n_vocab, cache_type, self.flash)
        )

    @property
    def speculator(self) -> Speculator | None:
        """What drafts from this context's states; None without it."""
        return self._speculator

    @property
    def pointer(self) -> Any:
        """The native context, for llama.cpp's own functions."""
        return self._open().pointer

    def set_cancel(
        self, should_stop: Callable[[], bool] | None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Have decodes ask `should_stop` before each of llama.cpp's batches, and a `Stop` also during a batch.

        A decode that is stopped raises Stopped, and has changed nothing. None: nothing is asked. A decode of several
        batches calls `progress` before the first and after each one, with the number of rows computed and of all.
        """
        if self._owned is not None:
            stop = should_stop if isinstance(should_stop, Stop) else None
            llama_api.set_cancel(self._owned, stop)
            if self._speculator is not None:
                self._speculator.set_cancel(stop)
        self._should_stop, self._progress = should_stop, progress

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """Pad decodes of n rows of one sequence to `widths[n]` rows, if that is more and there are free cells.

        The additional rows are copies of the last one, and are dropped. Some numbers of rows are faster than smaller
        ones, because llama.cpp computes quantised rows in fours, and the rest one by one. `heads` are the seconds of
        `HEADS` head rows, by which lazy heads are planned.
        """
        if self.lazy_head is not None and heads:
            self.lazy_head.take(heads)
        fills = self.captured is None and not self._cache.recurrent
        self._widths = widths if fills else ()

    def close(self) -> None:
        """Close the context; its memory is freed once no view of the logits is left."""
        sound = self._owned is not None and not self._owned.guard.busy
        if sound and self._saved is not None:
            self._lengths[0] = self._cache.settle(0, self._lost.pop(0, self._lengths[0]))
            self._saved.keep(self.cached(), self._cache.size(0), self.save, whole=not self._cache.plain)
        if self._speculator is not None:
            self._speculator.close()
            self._speculator = None
        self._owned = None
        self._cache.close()
        if self._lazy_head is not None:
            self._lazy_head.close()
            self._lazy_head = None
        self._logits = LogitsView(self.model.n_vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def cached(self, seq: int = 0) -> Ids:
        """Return the ids in a sequence's cache, shape (length,), as a read-only view until the sequence changes."""
        return self._sequences.view(seq)

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._lengths[self._sequences.known(seq)]

    def rollback(self, length: int, seq: int = 0) -> None:
        """Drop all but the first `length` positions of a sequence. What a recurrent state or a sliding window cannot
        give back is read again before the next decode.

        Raises:
            InvalidOption: the sequence is shorter than that.
        """
        self._open()
        now = self.length(seq)
        if not 0 <= length <= now:
            raise InvalidOption(f"Cannot roll back to {length} positions.", f"The sequence has {now}.")
        if length == now:
            return
        self._lengths[seq] = length
        if self._speculator is not None:
            self._speculator.truncate(seq, length)
        if seq in self._lost:
            now = self._lost.pop(seq)
            if now <= length:
                self._lose(seq, now, length)
                return
        self._lose(seq, self._cache.truncate(seq, length, now), length)

    def _lose(self, seq: int, held: int, length: int) -> None:
        """Note that the cache has `held` of a sequence's `length` positions."""
        if held < length:
            self._lost[seq] = held

    def reread(self, seq: int = 0) -> None:
        """Read again what a rollback has lost. Decodes do so themselves."""
        held, length = self._lost.pop(seq, None), self._lengths[seq]
        if held is None:
            return
        ids = self._sequences.view(seq)[held:length].copy()
        if (ids == NO_ID).any():
            self.clear(seq)
            raise ModelUnsupported(
                f"{self.model.name} cannot remove embedding rows from its cache: its state is recurrent.",
                "Use a transformer model.",
            )
        self._lengths[seq] = held
        try:
            for start in range(0, len(ids), self.n_batch):
                part = ids[start : start + self.n_batch]
                self._run(self._place(0, seq, part, 0), self._batch.tokens)
                self._lengths[seq] += len(part)
        except BaseException:
            now, self._lengths[seq] = self._lengths[seq], length
            self._lose(seq, self._cache.distrust(seq, now, now), length)
            raise

    def branch(self, src: int, dst: int) -> None:
        """Make sequence `dst` a copy of `src`; no keys or values are copied, unless `src` has to be read again.

        Raises:
            InvalidOption: the context is not unified, or a sequence does not exist.
        """
        if not self.unified:
            raise InvalidOption(
                "Sequences of a context with separate buffers cannot branch.", "Open the context with unified=True."
            )
        self._open()
        if self._sequences.known(src) != self._sequences.known(dst):
            self.reread(src)
            self._copy(src, dst)

    def _copy(self, src: int, dst: int) -> None:
        self._lost.pop(dst, None)
        if self._speculator is not None:
            self._speculator.clear(dst)
        copied = self._cache.copy(src, dst)
        self._sequences.copy(src, dst)
        self._lose(dst, self._lost.get(src, self._lengths[src]) if copied else 0, self._lengths[src])

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Copy the first `length` positions of `src` to sequence `dst`, without computing them; also across buffers.

        llama.cpp copies separate buffers only whole, when it next decodes; so this pays for long prefixes only.

        Raises:
            InvalidOption: `src` is shorter than that, or a sequence does not exist.
        """
        self._open()
        if not 0 <= length <= self.length(src):
            raise InvalidOption(f"Cannot copy {length} positions.", f"The sequence has {self.length(src)}.")
        if self._sequences.known(dst) != src:
            self._copy(src, dst)
        self.rollback(length, dst)

    def layer_rows(self, positions: int, seq: int = 0) -> list[LayerRows] | None:
        """Return the keys and values of all layers for a sequence's first positions; None if this cache cannot say."""
        if seq in self._lost or not 0 < positions <= self.length(seq):
            return None
        return self._cache.layer_rows(seq, positions)

    def adopt(self, layers: Sequence[LayerRows], seq: int = 0) -> bool:
        """Make a sequence one of these keys and values, of all layers; return False, with the sequence empty, if they
        are those of another kind of context. The ids of its positions stay unknown."""
        self.clear(seq)
        positions = layers[0].positions
        self._sequences.check_fits(seq, positions)
        streams = 1 if self.unified else self.n_seq
        if not self._cache.adopt(seq, layers, streams=streams, transposed=not self.flash):
            return False
        self._sequences.note(seq, np.full(positions, NO_ID, dtype=np.int32))
        self._lengths[seq] = positions
        return True

    def save(self, path: Path, seq: int = 0) -> bool:
        """Write a sequence to a file, with its ids; return whether that was possible."""
        return seq not in self._lost and self._cache.save_file(seq, self.cached(seq), path)

    def load(self, path: Path, seq: int = 0) -> int:
        """Make a sequence that of a file from `save`, which must be known to be whole; return its length: 0, with the
        sequence empty, if the file is of another kind of context."""
        self.clear(seq)
        ids = self._cache.load_file(seq, path, self.n_ctx)
        if ids is None:
            return 0
        self._sequences.note(seq, ids)
        self._lengths[seq] = len(ids)
        return len(ids)

    def clear(self, seq: int = 0) -> None:
        """Empty a sequence."""
        self._lengths[self._sequences.known(seq)] = 0
        self._lost.pop(seq, None)
        if self._speculator is not None:
            self._speculator.clear(seq)
        self._open()
        self._cache.clear(seq)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        """Roll back to the common prefix of the cache and `ids`, at most all ids but the last; return its length, or
        that of a beginning where the rest has to be read again.

        Decoding `ids[length:]` then completes the cache and gives fresh logits for the last id.

        Raises:
            InvalidOption: no ids.
        """
        if len(ids) == 0:
            raise InvalidOption("There are no ids to sync the cache with.", "Give at least one.")
        common = self._sequences.common(seq, ids[:-1])
        saved = self._saved if seq == 0 else None
        if saved is not None and saved.restore(ids[:-1], common, self.load, whole=not self._cache.plain):
            common = self._sequences.common(seq, ids[:-1])
        self.rollback(common, seq)
        if seq in self._lost:
            self._lengths[seq] = common = self._lost.pop(seq)
        self._cache.expect_draft(seq)
        return common

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Append `ids`, shape (n,), to a sequence; return the logits of the last `outputs` rows, (outputs, n_vocab).

        Row `i` predicts the token after `ids[n - outputs + i]`. The view is valid until the next decode.

        Raises:
            ContextFull: the ids do not fit, or no cell is left for them; nothing was changed.
            InvalidOption: no ids, an unknown sequence, or more outputs than ids or than `n_batch`.
            EngineFailed: llama.cpp refuses the batch (an id outside the vocabulary above all); nothing was changed.
        """
        n, row_by_row = len(ids), self._row_by_row
        if row_by_row and 1 < outputs <= n:
            return self._decode_row_by_row(ids, seq, outputs)
        if n > self.n_batch:
            return self.decode_rows((SeqRows(seq, ids, outputs),))[0]
        start = self._begin(seq, n, outputs)
        try:
            if row_by_row:
                rows = n
            else:
                rows = 2 if self._pairs and n == 1 == outputs else self._widths[n] if n < len(self._widths) else n
            if n < rows <= self.n_ctx - start:
                return self._decode_filled(seq, ids, outputs, start, rows)
            self._run(self._place(0, seq, ids, outputs), self._batch.tokens)
            self._lengths[seq] = start + n
        except BaseException:
            self._restore({seq: start})
            raise
        if self._plain:
            return self._logits.rows(self._open(), outputs)
        return self._views([(n, outputs)])[0]

    def decode_lazy(self, ids: Ids, *, seq: int = 0, outputs: int = 1, reached: Sequence[float] = ()) -> Rows:
        """Decode like `decode`, but compute the logits of a row only when it is read, if possible.

        `reached[i]` is the probability that row i + 1 is read; by default half that of the previous row.
        """
        lazy, model = self.lazy_head, self.model
        if lazy is None or not 1 < outputs <= ROWS or len(ids) > self.n_batch:
            return self.decode(ids, seq=seq, outputs=outputs)
        with lazy.watching(outputs, stops=model.head_is_plain is not None):
            rows = self.decode(ids, seq=seq, outputs=outputs)
        if lazy.kept != outputs:
            return rows
        if model.head_is_plain is None:  # the first time both ways, to check that they agree
            model.record_head_is_plain(lazy.agrees(rows))
            return rows
        return LazyLogits(lazy, outputs, reached or [0.5**row for row in range(1, outputs)])

    def decode_rows(self, rows: Sequence[SeqRows], embedded: Floats | None = None) -> list[Floats]:
        """Append to several sequences in one llama.cpp batch; return one view of (outputs, n_vocab) per entry.

        Rows beyond `n_batch` are decoded in earlier batches, so that the last one holds every row with an output.
        `embedded`: float32 rows, (n, n_embd), in place of all the ids, which must fit one batch.

        Raises:
            ContextFull, InvalidOption, EngineFailed: as for `decode`; nothing was changed in any sequence.
        """
        if len(rows) > 1 and embedded is None and not self._may_share(rows):
            return self._decode_one_by_one(rows)
        if len(rows) == 1 and embedded is None and len(rows[0].ids) <= self.n_batch:
            return [self.decode(rows[0].ids, seq=rows[0].seq, outputs=rows[0].outputs)]
        if embedded is not None:
            embedded, total = self._rows(embedded), sum(len(r.ids) for r in rows)
            if total > self.n_batch or embedded.shape != (total, self.model.n_embd):
                raise InvalidOption(
                    f"Embedding rows of shape {embedded.shape} for {total} positions.",
                    f"Give ({total}, {self.model.n_embd}), at most {self.n_batch} at once.",
                )
        starts = {r.seq: self._begin(r.seq, len(r.ids), r.outputs) for r in rows}
        wanted = sum(r.outputs for r in rows)
        if len(starts) < len(rows):
            raise InvalidOption("A sequence occurs twice in one batch.", "Merge its rows.")
        if wanted > self.n_batch:
            raise InvalidOption(f"{wanted} rows of logits exceed n_batch.", f"Ask for at most {self.n_batch} at once.")
        try:
            heads, rest = split(rows, self.n_batch)
            total = sum(len(r.ids) for r in rows)
            self._decode_heads(heads, total)
            at = 0
            for r in rest:
                at = self._place(at, r.seq, r.ids, r.outputs)
            self._cache.begin_shared_batch(starts)
            if at:
                self._run(at, self._batch.tokens if embedded is None else self._batch.embeddings(embedded))
            if heads and self._progress is not None:
                self._progress(total, total)
            for r in rest:
                self._lengths[r.seq] += len(r.ids)
        except BaseException:
            self._restore(starts)
            raise
        return self._views([(len(r.ids), r.outputs) for r in rest])

    def _decode_heads(self, heads: Sequence[SeqRows], total: int) -> None:
        """Decode the first of `total` rows, a batch for each of `heads`."""
        done = 0
        for r in heads:
            if self._progress is not None:
                self._progress(done, total)
            self._run(self._place(0, r.seq, r.ids, 0), self._batch.tokens)
            self._lengths[r.seq] += len(r.ids)
            done += len(r.ids)
        self._save({r.seq for r in heads})
        if heads and self._progress is not None:
            self._progress(done, total)

    def _may_share(self, rows: Sequence[SeqRows]) -> bool:
        """Return whether these sequences may be decoded in one batch."""
        n = {r.seq: len(r.ids) for r in rows}
        if len(n) < len(rows):  # which is refused
            return True
        if self._one_at_a_time or self._row_by_row:
            return False
        return self._cache.may_share(n) and (not self._cache.snapshots or sum(n.values()) <= self.n_batch)

    def _decode_row_by_row(self, ids: Ids, seq: int, outputs: int) -> Floats:
        """Decode like `decode`, with one row of logits in a batch."""
        start, at = self.length(seq), len(ids) - outputs + 1
        self._sequences.check_fits(seq, len(ids))
        try:
            rows = [self.decode(ids[:at], seq=seq).copy()]
            rows += [self.decode(ids[row : row + 1], seq=seq).copy() for row in range(at, len(ids))]
        except BaseException:
            self.rollback(start, seq)
            raise
        return np.concatenate(rows)

    def _decode_one_by_one(self, rows: Sequence[SeqRows]) -> list[Floats]:
        """Decode like `decode_rows`, each sequence in batches of its own."""
        before = {r.seq: self.length(r.seq) for r in rows}
        try:
            return [self.decode(r.ids, seq=r.seq, outputs=r.outputs).copy() for r in rows]
        except BaseException:
            for seq, length in before.items():
                self.rollback(length, seq)
            raise

    def decode_embeddings(self, rows: Floats, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Decode like `decode`, with float32 rows of shape (n, n_embd) as they enter the first layer, in place of ids.

        `cached` shows such positions as -1.
        """
        rows = self._rows(rows)
        if rows.ndim != 2 or rows.shape[1] != self.model.n_embd:
            raise InvalidOption(f"Embedding rows of shape {rows.shape}.", f"Give (n, {self.model.n_embd}).")
        start = self._begin(seq, len(rows), outputs)
        none = np.full(min(len(rows), self.n_batch), NO_ID, dtype=np.int32)
        try:
            while True:
                last = len(rows) <= self.n_batch
                size = len(rows) if last else min(self.n_batch, len(rows) - outputs)
                self._place(0, seq, none[:size], outputs if last else 0)
                self._run(size, self._batch.embeddings(rows[:size]))
                self._lengths[seq] += size
                if last:
                    break
                rows = rows[size:]
        except BaseException:
            self._restore({seq: start})
            raise
        return self._views([(size, outputs)])[0]

    def _rows(self, rows: Floats) -> Floats:
        """Return rows as llama.cpp wants them, which may scale them before the first layer."""
        if self._row_factor != 1.0:
            rows = rows * np.float32(self._row_factor)
        return np.ascontiguousarray(rows, dtype=np.float32)

    def _decode_filled(self, seq: int, ids: Ids, outputs: int, start: int, rows: int) -> Floats:
        """Decode `ids` in a batch of `rows` rows: those beyond the ids are copies of the last one, and are dropped."""
        n = self._place(0, seq, ids, outputs)
        end = start + n
        # the head has as many rows as there are outputs: with a large vocabulary it is a good part of the work
        heads = 1 < outputs < len(self._widths) and self.lazy_head is None
        more = self._widths[outputs] - outputs if heads else 0
        try:
            self._run(self._batch.fill(n, rows, end, min(more, rows - n)), self._batch.tokens, rows - n)
        except ContextFull:  # the ids alone may fit
            self._run(n, self._batch.tokens)
        else:
            self._lose(seq, self._cache.truncate(seq, end, start + rows), end)
        self._lengths[seq] = end
        return self._logits.rows(self._open(), outputs)

    def _begin(self, seq: int, n: int, outputs: int) -> int:
        """Return the length of the sequence if `n` more positions with `outputs` rows of logits are possible."""
        self._open()
        if n < 1 or not 0 <= outputs <= min(n, self.n_batch):
            raise InvalidOption(
                f"{outputs} rows of logits of {n} ids were asked for.", f"Give ids, and ask for at most {self.n_batch}."
            )
        length = self._sequences.check_fits(seq, n)
        if seq in self._lost:
            self.reread(seq)
        if self.captured is not None:
            self.captured.clear()
        return length

    def _place(self, at: int, seq: int, ids: Ids, outputs: int) -> int:
        """Put `ids` into the batch from row `at` on, and into the record; return the row after them."""
        if self._cache.recurrent:
            self._cache.begin_batch(seq, self._lengths[seq], len(ids), outputs)
        if self._speculator is not None:
            self._placed = [*(self._placed if at else ()), (at, seq, self._lengths[seq], len(ids))]
        return self._batch.put(at, seq, self._sequences.note(seq, ids), ids, outputs, self._flag_all)

    def _run(self, n: int, batch: Any, copies: int = 0) -> None:
        """Decode the first `n` rows of a batch; the last `copies` of them are not shown."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        if self.captured is not None:
            self.captured.begin(n, copies)
        context = self._open()
        with self.captured or self._lazy_head or _NO_OBSERVER, cores.computation(self.threads) as share:
            if share != self.threads_used:
                llama_api.set_threads(context, share)
                self.threads_used = share
            self.shared += share < self.threads
            llama_api.decode(context, batch, n)
        if self._speculator is not None:
            self._speculator.note(self._placed)

    def _save(self, seqs: set[int]) -> None:
        """Save checkpoints of sequences in the middle of a long prompt: its end may change."""
        if not self._cache.plain:
            for seq in seqs:
                self._cache.save(seq, self._lengths[seq])

    def _views(self, rows: Sequence[tuple[int, int]]) -> list[Floats]:
        """Return the logits for the entries of the last batch, given as (rows, rows with logits wanted)."""
        if self.captured is not None and self.captured.stops:
            return [self._logits.none] * len(rows)
        flagged = [n if self._flag_all else outputs for n, outputs in rows]
        view, end, views = self._logits.rows(self._open(), sum(flagged)), 0, []
        for (_, outputs), n in zip(rows, flagged, strict=True):
            end += n
            views.append(view[end - outputs : end])
        return views

    def _open(self) -> native.Owned:
        if self._owned is None:
            raise EngineFailed("The context is closed.", "Open another.")
        native.process_exit.block_if_exiting()
        return self._owned

    def _restore(self, starts: dict[int, int]) -> None:
        for seq, start in starts.items():
            now, self._lengths[seq] = self._lengths[seq], start
            if self._speculator is not None:
                self._speculator.truncate(seq, start)
            if self._owned is not None:  # it may have been closed from elsewhere
                self._lost.pop(seq, None)
                self._lose(seq, self._cache.distrust(seq, start, now), start)

"""A key-value cache over a model, and the ways to decode: rows of one sequence or of several, padded, filled up, apart.

A decode costs a few microseconds more than llama.cpp's own, because more would show at the speed of a tiny model: one
batch whose arrays are numpy's, one numpy view over the logits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any, Self, cast

import numpy as np

from edgellm.engine import llama_api, native
from edgellm.engine.gguf.cuttable import row_factor
from edgellm.engine.graph_hooks import Capture, Recorder
from edgellm.engine.kv.row_padding import MOST_PADDING, PADDINGS, TRIED_ROWS, Padding, agree
from edgellm.engine.kv.saved_prompts import SavedPrompts
from edgellm.engine.kv.sequences import NO_ID, CachedSequences, SeqRows, split
from edgellm.engine.llama_api import NO_OBSERVER, LlamaBatch, NativeContext, NativeSpec
from edgellm.engine.model import ContextSpec, Model
from edgellm.engine.native import Stop
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import ContextFull, InvalidOption, ModelUnsupported
from edgellm.state import read_cached, write_cached
from edgellm.system import cache_dir


class Context(CachedSequences):
    """Sequences of positions, decoded by one model. For one thread at a time.

    Logits are views into llama.cpp's buffer: copy any that must outlive the next decode.
    """

    def __init__(
        self, model: Model, spec: ContextSpec, *, capture: Capture | None = None,
        saved_prompts: SavedPrompts | None = None,
    ) -> None:  # fmt: skip
        """Reserve the cache. The first sequence, or each that has its own buffer, is restored from `saved_prompts` as
        far as possible when it is synced, and kept there when the context is closed. Raises InvalidOption: as for
        `ContextSpec.resolved`, or a layer to capture that does not exist; EngineFailed: llama.cpp cannot reserve it,
        for want of memory above all."""
        opened = spec.resolved(model, capture)
        if capture is not None:
            capture.check(model.n_layer)
        if spec.reproducible:
            inner = None if capture is None or capture.stop_after is None else capture
            padding = spec.padding or padding_of(model, opened, partial(_fits, model, opened, inner), inner is None)
            opened = replace(opened, padding=padding)
        self.captured = None if capture is None else Recorder(capture, spec.n_seq, spec.unified)
        callback = self.captured and self.captured.nodes.callback
        owned = llama_api.open_context(model.owned, opened, callback=callback)
        super().__init__(model, opened, NativeContext(owned, opened.threads, model.n_vocab), saved_prompts)
        if spec.speculates and capture is None and model.speculator is not None:
            self.speculator = model.speculator.open(self.native, opened)
        self._progress: Callable[[int, int, int], None] = lambda *_: None
        room = spec.n_ctx + (MOST_PADDING if spec.reproducible else 0)
        # The last layer's output holds only rows with logits.
        every = capture is not None and capture.stop_after == model.n_layer - 1
        self._batch = LlamaBatch(opened.rows, room, planes=model.position_planes, flag_all=every)
        # To how many rows n rows of a sequence are padded, so that logits do not depend on n.
        self._padded: Callable[[int], int] = (lambda n: n) if opened.padding is None else opened.padding.rows
        # The same for a decode of one sequence alone, which `fill` also pads to where more rows are faster.
        self._filled: Callable[[int], int] = self._padded

    def set_cancel(
        self, should_stop: Callable[[], bool] | None, progress: Callable[[int, int, int], None] | None = None
    ) -> None:
        """Have decodes ask `should_stop` before each of llama.cpp's batches, and a `Stop` also during a batch.

        A decode that is stopped raises Stopped, and has changed nothing. None: nothing is asked. A decode of several
        batches calls `progress(known, done, total)` before the first and after each batch, in positions: those before
        the decode, now and at its end. Rows behind the first output do not count, as they are drafted.
        """
        self.native.set_cancel(should_stop)
        if self.speculator is not None:
            self.speculator.set_cancel(should_stop if isinstance(should_stop, Stop) else None)
        self._progress = progress or (lambda *_: None)

    def fill(self, widths: Sequence[int]) -> None:
        """Pad decodes of n rows of one sequence to `widths[n]` rows, if that is more and there are free cells.

        The padding copies the last row, and is dropped. Some numbers of rows are faster than smaller numbers,
        because llama.cpp computes quantised rows in fours, and the rest one by one.
        """
        self._filled = self._padded if self.recurrent else lambda n: widths[n] if n < len(widths) else n

    def close(self) -> None:
        """Close the context; its memory is freed once no view of the logits is left."""
        sound = not self.native.closed and not self.native.owned.guard.busy
        if sound and self._saved_prompts is not None:
            for seq in self._savable:
                self._to_disk(self._saved_prompts, seq)
        if self.speculator is not None:
            self.speculator.close()
            self.speculator = None
        self.native.close()
        self._cache.close()
        native.release_threads()  # A thread that only measured would keep an idle OpenMP team.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Append `ids`, shape (n,), to a sequence; return the logits of the last `outputs` rows, (outputs, n_vocab).

        Row `i` predicts the token after `ids[n - outputs + i]`. The view is valid until the next decode. Raises
        ContextFull: the ids do not fit, or no cell is left for them; nothing was changed; InvalidOption: no ids, or
        more outputs than ids; EngineFailed: llama.cpp refuses the batch (an id outside the
        vocabulary above all); nothing was changed.
        """
        n, most = len(ids), self.n_batch
        if most < outputs <= n:
            self._sequences.check_fits(seq, n)
            at = n - outputs + most
            rest = (ids[row : row + most] for row in range(at, n, most))
            first = SeqRows(seq, ids[:at], most)
            return np.concatenate(self._decode_apart((first, *(SeqRows(seq, part, len(part)) for part in rest))))
        if n > most or self._borders(seq, ids, outputs):
            return self.decode_rows((SeqRows(seq, ids, outputs),))[0]
        start = self._begin(seq, n, outputs)
        try:
            if self.captured is not None or self.native_spec.padding is not None:
                return self._decode_batch((SeqRows(seq, ids, outputs),), self._padded)[0]
            if n < self._filled(n) <= self.n_ctx - start:
                with suppress(ContextFull):  # the ids alone may fit
                    return self._decode_batch((SeqRows(seq, ids, outputs),), self._filled)[0]
            self._run(self._place(0, seq, ids, outputs), self._batch.tokens)
            self._sequences.lengths[seq] = start + n
        except BaseException:
            self._undo({seq: start})
            raise
        return self.native.rows(outputs)

    def decode_rows(self, rows: Sequence[SeqRows]) -> list[Floats]:
        """Append to several sequences in one llama.cpp batch; return one view of (outputs, n_vocab) per entry.

        Rows beyond `n_batch` are decoded in earlier batches, so that the last one holds every row with an output.
        Either all entries have embedding rows, or none. Raises ContextFull, InvalidOption, EngineFailed: as for
        `decode`; nothing was changed in any sequence.
        """
        if not rows or (len(rows) > 1 and not self._may_share(rows)):
            return self._decode_apart(rows)
        borders = self._borders(rows[0].seq, rows[0].ids, rows[0].outputs) if len(rows) == 1 else []
        if len(rows) == 1 and rows[0].embedded is None and len(rows[0].ids) <= self.n_batch and not borders:
            return [self.decode(rows[0].ids, seq=rows[0].seq, outputs=rows[0].outputs)]
        starts = {r.seq: self._begin(r.seq, len(r.ids), r.outputs) for r in rows}
        wanted = sum(r.outputs for r in rows)
        if len(starts) < len(rows):
            raise InvalidOption("A sequence occurs twice in one batch.", "Merge its rows.")
        if wanted > self.n_batch:
            raise InvalidOption(f"{wanted} rows of logits exceed n_batch.", f"Ask for at most {self.n_batch} at once.")
        try:
            most = self.n_batch - (0 if self.native_spec.padding is None else MOST_PADDING * len(rows))
            earlier, rest = split(rows, most, borders)
            known = sum(starts.values())
            total = known + sum(len(r.ids) - r.outputs + 1 for r in rows)
            self._decode_earlier(earlier, known, total, borders)
            views = self._decode_batch(rest, self._padded)
            if earlier:
                self._progress(known, total, total)
        except BaseException:
            self._undo(starts)
            raise
        return views

    def decode_embeddings(self, rows: Floats, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Decode like `decode`, with float32 rows of shape (n, n_embd) as they enter the first layer, in place of ids.

        `cached` shows such positions as -1.
        """
        unknown = np.full(len(rows), NO_ID, dtype=np.int32)
        return self.decode_rows((SeqRows(seq, unknown, outputs, rows),))[0]

    def inner_rows(self, n: int) -> Floats:
        """Return the output of the layer after which the graph stops for the `n` positions of the last decode, shape
        (n, n_embd), without those of padding."""
        return cast(Recorder, self.captured).output()[:n]

    def _entering(self, parts: Sequence[Floats], total: int) -> Floats:
        """Return `total` embedding rows as llama.cpp wants them, which may scale them before the first layer. Raise
        InvalidOption for a wrong number of them."""
        rows = np.concatenate(parts)
        if rows.shape != (total, self.model.n_embd):
            raise InvalidOption(
                f"Embedding rows of shape {rows.shape} for {total} positions.", f"Give ({total}, {self.model.n_embd})."
            )
        if (factor := row_factor(self.model.header)) != 1.0:
            rows = rows * np.float32(factor)
        return np.ascontiguousarray(rows, dtype=np.float32)

    def _decode_earlier(self, earlier: Sequence[SeqRows], known: int, total: int, borders: Sequence[int]) -> None:
        """Decode the first rows behind `known` of `total` positions, a batch for each of `earlier`. Checkpoints are
        saved at the `borders`, and at the end: the end of a long prompt may change."""
        done = 0
        for r in earlier:
            self._progress(known, known + done, total)
            self._read(r)
            done += len(r.ids)
            if not self._cache.plain and (done in borders or r is earlier[-1]):
                self._cache.save(r.seq, self._sequences.lengths[r.seq], border=True)
        if earlier:
            self._progress(known, known + done, total)

    def _borders(self, seq: int, ids: Ids, outputs: int) -> list[int]:
        """Return after how many of the ids a cache that is not cut by positions gets checkpoints: where the last turn
        ends, as a thought behind it may be left out later, and where the first one of a sequence does."""
        if self._cache.plain or len(ids) <= outputs:
            return []
        ends = np.flatnonzero(ids[: len(ids) - outputs] == self.model.end_of_turn).tolist()
        chosen = ends[-1:] if self._sequences.lengths[seq] else ends[:1] + ends[1:][-1:]
        return [end + 1 for end in chosen]

    def _may_share(self, rows: Sequence[SeqRows]) -> bool:
        """Return whether these sequences may be decoded in one batch."""
        n = {r.seq: len(r.ids) for r in rows}
        if len(n) < len(rows):  # the batch is refused later
            return True
        return self._cache.may_share(n) and (not self._cache.snapshots or sum(n.values()) <= self.n_batch)

    def _decode_apart(self, parts: Sequence[SeqRows]) -> list[Floats]:
        """Decode like `decode_rows`, each part in batches of its own."""
        before = {r.seq: self.length(r.seq) for r in parts}
        try:
            return [self.decode_rows((r,))[0].copy() for r in parts]
        except BaseException:
            for seq, length in before.items():
                self.rollback(length, seq)
            raise

    def _decode_batch(self, rows: Sequence[SeqRows], padded_to: Callable[[int], int]) -> list[Floats]:
        """Decode rows that fit one batch; return a view for each sequence. It is padded with copies of its last row,
        which are dropped, and as many rows more have logits: the head, too, computes a row by how many there are, and
        is much of the work with a large vocabulary."""
        lengths = self._sequences.lengths
        end, shown, places, embedded = 0, 0, [], list[Floats]()
        for r in rows:
            first, n, padded = end, len(r.ids), padded_to(len(r.ids))
            if r.embedded is not None:
                embedded += (r.embedded, np.repeat(r.embedded[-1:], padded - n, axis=0))
            after = self._place(first, r.seq, r.ids, r.outputs)
            end = self._batch.fill(after, first + padded, lengths[r.seq] + n)
            wanted = padded if self._batch.flag_all else padded_to(r.outputs) if r.outputs else 0
            last = min(padded, n - r.outputs + wanted)
            self._batch.show(first + last - wanted, first + last)
            places.append(shown + n - r.outputs - (last - wanted))
            shown += wanted
        self._cache.begin_shared_batch({r.seq for r in rows})
        entering = self._entering(embedded, end) if embedded else None
        self._run(end, self._batch.tokens if entering is None else self._batch.embeddings(entering))
        for r in rows:
            now = lengths[r.seq] + padded_to(len(r.ids))
            lengths[r.seq] += len(r.ids)
            if now > lengths[r.seq]:
                self._lose(r.seq, self._cache.truncate(r.seq, lengths[r.seq], now), lengths[r.seq])
        if self.captured is not None and self.captured.stops:
            return [self.native.no_rows] * len(rows)
        view = self.native.rows(shown)
        return [view[at : at + r.outputs] for at, r in zip(places, rows, strict=True)]

    def _begin(self, seq: int, n: int, outputs: int) -> int:
        """Return the length of the sequence if `n` more positions with `outputs` rows of logits are possible."""
        self.native.check_open()
        if n < 1 or not 0 <= outputs <= min(n, self.n_batch):
            raise InvalidOption(
                f"{outputs} rows of logits of {n} ids were asked for.", f"Give ids, and ask for at most {self.n_batch}."
            )
        length = self._sequences.check_fits(seq, n)
        if seq in self._held:
            self.reread(seq)
        if self.captured is not None:
            self.captured.clear()
        return length

    def _place(self, at: int, seq: int, ids: Ids, outputs: int) -> int:
        """Put `ids` into the batch from row `at` on, and into the record; return the row after them."""
        if self.recurrent:
            self._cache.begin_batch(seq, self._sequences.lengths[seq], len(ids), outputs)
        if self.speculator is not None:
            self.speculator.place(at, seq, self._sequences.lengths[seq], len(ids))
        return self._batch.put(at, seq, self._sequences.note(seq, ids), ids, outputs)

    def _read(self, part: SeqRows) -> None:
        self._decode_batch((part,), self._padded)

    def _run(self, n: int, batch: Any) -> None:
        """Decode the first `n` rows of a batch."""
        if self.captured is not None:
            self.captured.begin(n)
        self.native.decode(batch, n, self.captured or NO_OBSERVER)
        if self.speculator is not None:
            self.speculator.note()


def _fits(model: Model, spec: NativeSpec, inner: Capture | None, padding: Padding) -> bool:
    """Return whether logits, or the rows of an `inner` layer, do not depend on how ids are batched, with this padding.
    A recurrent state cannot drop rows of padding.

    A part of a model is given rows that are small, as embeddings are: in large ones, what a layer adds would be rounded
    away. A single row is always padded there: few layers may hide that its attention is another.
    """
    part = inner is not None or not model.has_vocabulary
    if part and padding.least == 1:
        return False
    known = 0.02 * np.random.default_rng(1).standard_normal((TRIED_ROWS, model.n_embd), dtype=np.float32)
    tried = ContextSpec(TRIED_ROWS, n_batch=TRIED_ROWS, threads=spec.threads, reproducible=True, padding=padding)
    with Context(model, tried, capture=inner) as context:

        def decode(ids: Ids, position: int, outputs: int) -> Floats:
            context.rollback(position)
            if not part:
                return context.decode(ids, outputs=outputs)
            logits = context.decode_embeddings(known[ids], outputs=0 if inner else outputs)
            return logits if inner is None else context.inner_rows(len(ids))[-outputs:]

        return not context.recurrent and agree(decode, TRIED_ROWS if part else model.n_vocab)


def padding_of(model: Model, spec: NativeSpec, fits: Callable[[Padding], bool], head: bool = True) -> Padding:
    """Return the cheapest padding by which a row's logits do not depend on the rows beside it: known from an earlier
    trial of such tensors, with or without a `head`, or found now by `fits`. Raises ModelUnsupported: there is none."""
    found: list[Padding] | None = []
    if not model.offloaded:
        header = model.header
        shape = sorted(
            (key, str(value)) for key, value in header.metadata.items() if key.startswith(header.architecture)
        )
        kinds = sorted({(one.kind, one.shape) for one in header.tensors})
        how = f"{native.features().instructions} {spec.threads} {spec.cache_type} {head} {shape} {kinds}"
        path = cache_dir() / "probed" / f"rows-{sha256(how.encode()).hexdigest()[:32]}.json"
        found = read_cached(path, lambda known: [Padding(*map(int, one)) for one in known])
        if found is None:
            found = list(islice(filter(fits, PADDINGS), 1))
            write_cached(path, list(map(astuple, found)))
    if not found:
        raise ModelUnsupported(
            f"This llama.cpp computes {model.name} differently with each number of tokens.", "Leave out --reproducible."
        )
    return found[0]

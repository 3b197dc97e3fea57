"""A key-value cache over a model: decode, roll back, branch.

The cost of a decode here beside llama.cpp's own is a few microseconds, because at the speed of a tiny model that is
what shows: one batch whose arrays are numpy's, one numpy view over the logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np

from edgellm.engine import driver, native
from edgellm.engine.batch import Batch, SeqRows, Twig, split
from edgellm.engine.cache import Cache
from edgellm.engine.capture import Capture, Recorder
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.engine.stop import Stop
from edgellm.engine.types import Floats, Ids
from edgellm.errors import ContextFull, InvalidOption, ModelUnsupported, Stopped

_UNWATCHED = nullcontext()
NO_ID = -1  # stands in the cache where an embedding row was decoded instead of a token


class Context(Cache):
    """`n_seq` sequences of up to `n_ctx` positions each, decoded by one model. For one thread at a time.

    `unified`: one buffer for all sequences, in which branching copies nothing; without it each has its own, which is
    faster for many unrelated sessions. With `spare` a unified buffer has `n_ctx + spare` cells instead of room for all
    sequences in full: enough for one sequence and branches of it, which share its cells. `threads` defaults to the
    physical cores that this process may use, and to one for a tiny model. `exact` keeps the cache in float32 and does
    without flash attention, so that logits do not depend on how the ids were batched (1e-5 of the largest; flash
    attention on a CPU rounds to 16 bits, and differently for other batch sizes: 1e-3). It defaults to what the weights
    are: exact for a model in float32. Without flash attention a single token of a small model is decoded beside a copy
    of itself, which is forgotten at once: llama.cpp has a fast attention for two rows and more.
    Logits are views into llama.cpp's buffer: copy what must outlive the next decode.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq: int = 1,
        n_batch: int = 512,
        threads: int | None = None,
        unified: bool = True,
        spare: int | None = None,
        capture: Capture | None = None,
        exact: bool | None = None,
        flash: bool | None = None,
    ) -> None:
        """Reserves the cache. `flash` attention is left to `flash_pays`, where it can be had.

        Raises:
            InvalidOption: a size that is not positive, too many sequences, fewer rows in a batch than sequences (where
                llama.cpp would abort), spare cells for separate buffers, a layer to capture that does not exist.
            EngineFailed: llama.cpp cannot reserve it, for want of memory above all.
        """
        driver.check_sizes(n_ctx, n_seq, n_batch, threads, unified, spare)
        if capture is not None:
            capture.check(model.n_layer)
        super().__init__(model, n_ctx, n_seq, unified)
        cells = n_ctx * n_seq if spare is None else min(n_ctx + spare, n_ctx * n_seq)
        self.n_batch = max(n_seq, min(n_batch, cells))
        self.threads = threads or native.default_threads(model.n_params)
        self.exact = model.is_f32 if exact is None else exact
        flash = native.flash_pays(model.n_params, self.n_batch) if flash is None else flash
        self.flash = flash and not self.exact and not (capture and capture.attention)
        self.captured = None if capture is None else Recorder(capture, n_seq, unified)
        self._owned = driver.open_context(
            model.owned,
            positions=cells,
            sequences=n_seq,
            rows=self.n_batch,
            threads=self.threads,
            unified=unified,
            exact=self.exact,
            callback=self.captured and self.captured.callback,
            flash_attention=self.flash,
        )
        if not lib.llama_get_memory(self._owned.pointer):
            raise ModelUnsupported(f"{model.name} keeps no cache.", "Use a model that generates text.")
        self._logits = driver.LogitsView(model.n_vocab)
        self._stopped: Callable[[], bool] | None = None
        self._batch = Batch(self.n_batch, n_ctx)
        outer = None if capture is None else {capture.stop_after, *capture.outputs}
        # the last layer's output holds only the rows of which logits are wanted
        self._flag_all = bool(outer and model.n_layer - 1 in outer)
        self._plain = not self._flag_all and (capture is None or capture.stop_after is None)
        rows_only = capture is None or not (capture.outputs or (self.captured and self.captured.stops))
        self._pairs = rows_only and not self.flash and not self.exact and native.is_small(model.n_params)
        self._widths: Sequence[int] = ()

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """From now on `stopped` is asked before each of llama.cpp's batches, and a `Stop` also while it is computed.
        A decode that it ends raises Stopped, and has changed nothing. None: nobody is asked.
        """
        if self._owned is not None:
            driver.heed(self._owned, stopped if isinstance(stopped, Stop) else None)
        self._stopped = stopped

    def fill(self, widths: Sequence[int]) -> None:
        """From now on a decode of n rows of one sequence gets `widths[n]`, where that is more and there is room: copies
        of the last row, which are forgotten. Some numbers of rows take less time than smaller ones: llama.cpp computes
        fours of quantised rows together, and the rest one by one.
        """
        self._widths = widths if self.captured is None else ()

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Appends `ids`, shape (n,), to a sequence; returns the logits of the last `outputs` rows, (outputs, n_vocab).

        Row `i` predicts the token after `ids[n - outputs + i]`. The view is valid until the next decode.

        Raises:
            ContextFull: the ids do not fit, or no cell is left for them; nothing was changed.
            InvalidOption: no ids, an unknown sequence, or more outputs than ids or than `n_batch`.
            EngineFailed: llama.cpp refuses the batch (an id outside the vocabulary above all); nothing was changed.
        """
        n = len(ids)
        if n > self.n_batch:
            return self.decode_rows((SeqRows(seq, ids, outputs),))[0]
        start = self._begin(seq, n, outputs)
        try:
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

    def _decode_filled(self, seq: int, ids: Ids, outputs: int, start: int, rows: int) -> Floats:
        """Decodes `ids` in a batch of so many rows: the others are copies of the last one, and forgotten."""
        n = self._place(0, seq, ids, outputs)
        end = start + n
        # the head has as many rows as there are outputs: with a large vocabulary it is a good part of the work
        more = self._widths[outputs] - outputs if 1 < outputs < len(self._widths) else 0
        try:
            self._run(self._batch.fill(n, rows, end, min(more, rows - n)), self._batch.tokens, rows - n)
        except ContextFull:  # there are cells for the ids
            self._run(n, self._batch.tokens)
        else:
            self._forget(seq, end)
        self._lengths[seq] = end
        return self._logits.rows(self._open(), outputs)

    def decode_tree(self, ids: Ids, twigs: Sequence[Twig], *, outputs: int) -> tuple[Floats, list[Floats]]:
        """Appends `ids` to sequence 0, and makes sequence k + 1 what it would be with twig k: one batch, in which rows
        that several have in common are computed once.

        Returns the logits of the last `outputs` rows of `ids`, (outputs, n_vocab), and of all rows of each twig.

        Raises:
            ContextFull, EngineFailed: as for `decode`; nothing was changed in sequence 0.
            InvalidOption: too many twigs or rows, a twig that does not stand behind one of `ids`, or a context that has
                captures or is not unified.
        """
        rows = len(ids) + sum(len(twig.ids) for twig in twigs)
        if not self.unified or not self._plain or len(twigs) >= self.n_seq or rows > self.n_batch:
            raise InvalidOption(f"A tree of {rows} rows and {len(twigs)} twigs.", "Open a wider, unified context.")
        if not all(0 < twig.at <= len(ids) and len(twig.ids) for twig in twigs):
            raise InvalidOption("A twig stands behind none of the ids.", f"Give places from 1 to {len(ids)}.")
        longest = max([len(ids), *(twig.at + len(twig.ids) for twig in twigs)])
        start = self._begin(0, longest, outputs)
        for number, twig in enumerate(twigs, 1):
            self.branch(0, number)
            self._sequences.note(number, np.concatenate((ids[: twig.at], twig.ids)))
        self._sequences.note(0, ids)
        try:
            self._run(*self._batch.put_tree(start, ids, twigs, outputs))
        except BaseException:
            self._restore(dict.fromkeys(range(len(twigs) + 1), start))
            raise
        self._lengths[0] = start + len(ids)
        for number, twig in enumerate(twigs, 1):
            self._lengths[number] = start + twig.at + len(twig.ids)
        view = self._logits.rows(self._open(), outputs + rows - len(ids))
        ends = np.cumsum([outputs, *(len(twig.ids) for twig in twigs)])
        return view[:outputs], [view[a:b] for a, b in itertools.pairwise(ends.tolist())]

    def decode_rows(self, rows: Sequence[SeqRows], embedded: Floats | None = None) -> list[Floats]:
        """Appends to several sequences in one llama.cpp batch; one view of (outputs, n_vocab) per entry.

        What exceeds `n_batch` is decoded in batches before, so that the last one holds every row with an output.
        `embedded`: float32 rows, (n, n_embd), in place of all the ids, which must fit one batch.

        Raises:
            ContextFull, InvalidOption, EngineFailed: as for `decode`; nothing was changed in any sequence.
        """
        batch = self._batch.tokens
        if len(rows) == 1 and embedded is None and len(rows[0].ids) < min(len(self._widths), self.n_batch):
            return [self.decode(rows[0].ids, seq=rows[0].seq, outputs=rows[0].outputs)]
        if embedded is not None:
            embedded, total = np.ascontiguousarray(embedded, dtype=np.float32), sum(len(r.ids) for r in rows)
            if total > self.n_batch or embedded.shape != (total, self.model.n_embd):
                raise InvalidOption(
                    f"Embedding rows of shape {embedded.shape} for {total} positions.",
                    f"Give ({total}, {self.model.n_embd}), at most {self.n_batch} at once.",
                )
            batch = self._batch.embeddings(embedded)
        starts = {r.seq: self._begin(r.seq, len(r.ids), r.outputs) for r in rows}
        wanted = sum(r.outputs for r in rows)
        if len(starts) < len(rows):
            raise InvalidOption("A sequence is named twice in one batch.", "Join its ids.")
        if wanted > self.n_batch:
            raise InvalidOption(f"{wanted} rows of logits exceed n_batch.", f"Ask for at most {self.n_batch} at once.")
        try:
            heads, rest = split(rows, self.n_batch)
            for r in heads:
                self._run(self._place(0, r.seq, r.ids, 0), self._batch.tokens)
                self._lengths[r.seq] += len(r.ids)
            at = 0
            for r in rest:
                at = self._place(at, r.seq, r.ids, r.outputs)
            if at:
                self._run(at, batch)
            for r in rest:
                self._lengths[r.seq] += len(r.ids)
        except BaseException:
            self._restore(starts)
            raise
        return self._views([(len(r.ids), r.outputs) for r in rest])

    def decode_embeddings(self, rows: Floats, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Like `decode`, with float32 rows of shape (n, n_embd) in place of the embedded tokens.

        `cached` shows such positions as -1.
        """
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.model.n_embd:
            raise InvalidOption(f"Embedding rows of shape {rows.shape}.", f"Give (n, {self.model.n_embd}).")
        start = self._begin(seq, len(rows), outputs)
        none = np.full(min(len(rows), self.n_batch), NO_ID, dtype=np.int32)
        try:
            while True:
                last = len(rows) <= self.n_batch
                size = len(rows) if last else min(self.n_batch, len(rows) - outputs)
                self._place(0, seq, none[:size], outputs if last else 0)
                self._run(size, self._batch.embeddings(rows))
                self._lengths[seq] += size
                if last:
                    break
                rows = rows[size:]
        except BaseException:
            self._restore({seq: start})
            raise
        return self._views([(size, outputs)])[0]

    @property
    def pointer(self) -> Any:
        """For llama.cpp's own functions."""
        return self._open().pointer

    def close(self) -> None:
        """Gives the memory back, once nobody holds a view of the logits any more."""
        self._owned = None
        self._logits = driver.LogitsView(self.model.n_vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _begin(self, seq: int, n: int, outputs: int) -> int:
        """The length of the sequence, if `n` more positions with `outputs` rows of logits are possible."""
        self._open()
        if n < 1 or not 0 <= outputs <= min(n, self.n_batch):
            raise InvalidOption(
                f"{outputs} rows of logits of {n} ids were asked for.", f"Give ids, and ask for at most {self.n_batch}."
            )
        if self.captured is not None:
            self.captured.clear()
        return self._sequences.room(seq, n)

    def _place(self, at: int, seq: int, ids: Ids, outputs: int) -> int:
        """Puts `ids` into the batch from row `at` on, and into the record; returns the row after them."""
        return self._batch.put(at, seq, self._sequences.note(seq, ids), ids, outputs, self._flag_all)

    def _run(self, n: int, batch: Any, copies: int = 0) -> None:
        """Decodes the first `n` rows of a batch; the last `copies` of them are not to be seen."""
        if self._stopped is not None and self._stopped():
            raise Stopped
        if self.captured is not None:
            self.captured.copies = copies
        with self.captured or _UNWATCHED:
            driver.decode(self._open(), batch, n)

    def _views(self, rows: Sequence[tuple[int, int]]) -> list[Floats]:
        """Logits for the entries of the last batch, given as (rows, rows with logits wanted)."""
        if self.captured is not None and self.captured.stops:
            return [self._logits.none] * len(rows)
        flagged = [n if self._flag_all else outputs for n, outputs in rows]
        view, end, views = self._logits.rows(self._open(), sum(flagged)), 0, []
        for (_, outputs), n in zip(rows, flagged, strict=True):
            end += n
            views.append(view[end - outputs : end])
        return views

"""A key-value cache over a model: decode, roll back, branch.

A decode costs a few microseconds more than llama.cpp's own, because more would show at the speed of a tiny model: one
batch whose arrays are numpy's, one numpy view over the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engine.decoding.batch import SeqRows, split
from edgellm.engine.decoding.lazy_logits import LateRows, Rows
from edgellm.engine.decoding.lm_head import ROWS
from edgellm.engine.decoding.passes import Passes
from edgellm.engine.types import Floats, Ids
from edgellm.errors import ContextFull, InvalidOption

NO_ID = -1  # stands in the cache where an embedding row was decoded instead of a token


class Context(Passes):
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

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        """Append `ids`, shape (n,), to a sequence; return the logits of the last `outputs` rows, (outputs, n_vocab).

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

    def decode_late(self, ids: Ids, *, seq: int = 0, outputs: int = 1, reached: Sequence[float] = ()) -> Rows:
        """Decode like `decode`, but, where possible, compute the logits of a row only when it is looked at.

        `reached[i]` is the chance that row i + 1 is looked at; by default half that of the row before.
        """
        late, model = self.late, self.model
        if late is None or not 1 < outputs <= ROWS or len(ids) > self.n_batch:
            return self.decode(ids, seq=seq, outputs=outputs)
        with late.watching(outputs, stops=model.head_is_plain is not None):
            rows = self.decode(ids, seq=seq, outputs=outputs)
        if late.kept != outputs:
            return rows
        if model.head_is_plain is None:  # the first time both ways, to see whether they agree
            model.found_head(late.agrees(rows))
            return rows
        return LateRows(late, outputs, reached or [0.5**row for row in range(1, outputs)])

    def _decode_filled(self, seq: int, ids: Ids, outputs: int, start: int, rows: int) -> Floats:
        """Decode `ids` in a batch of `rows` rows: those beyond the ids are copies of the last one, and are dropped."""
        n = self._place(0, seq, ids, outputs)
        end = start + n
        # the head has as many rows as there are outputs: with a large vocabulary it is a good part of the work
        heads = 1 < outputs < len(self._widths) and self.late is None
        more = self._widths[outputs] - outputs if heads else 0
        try:
            self._run(self._batch.fill(n, rows, end, min(more, rows - n)), self._batch.tokens, rows - n)
        except ContextFull:  # the ids alone may fit
            self._run(n, self._batch.tokens)
        else:
            self._forget(seq, end)
        self._lengths[seq] = end
        return self._logits.rows(self._open(), outputs)

    def decode_rows(self, rows: Sequence[SeqRows], embedded: Floats | None = None) -> list[Floats]:
        """Append to several sequences in one llama.cpp batch; return one view of (outputs, n_vocab) per entry.

        Rows beyond `n_batch` are decoded in earlier batches, so that the last one holds every row with an output.
        `embedded`: float32 rows, (n, n_embd), in place of all the ids, which must fit one batch.

        Raises:
            ContextFull, InvalidOption, EngineFailed: as for `decode`; nothing was changed in any sequence.
        """
        batch = self._batch.tokens
        if len(rows) == 1 and embedded is None and len(rows[0].ids) <= self.n_batch:
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
        """Decode like `decode`, with float32 rows of shape (n, n_embd) in place of the embedded tokens.

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

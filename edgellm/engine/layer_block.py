"""A few layers of a model as a unit of computation: ids or rows in, rows or logits out.

A stage of a mesh is a chain of blocks, so that its first layers can compute while its last layers still load.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from edgellm.engine import native
from edgellm.engine.context import Context, padding_of
from edgellm.engine.graph_hooks import Capture, Recorder
from edgellm.engine.hardware import N_BATCH, QUANTISED
from edgellm.engine.kv.row_padding import MOST_PADDING, TRIED_ROWS, Padding, agree
from edgellm.engine.kv.sequences import SeqRows
from edgellm.engine.model import ContextSpec, Model
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Ids (n,) or rows (n, n_embd) of a sequence for a block, as for `Block.forward`."""

    data: Ids | Floats
    start: int
    seq: int
    outputs: int = 0


class Block:
    """A shard (`cut`) with a cache of its own for `n_seq` sequences of `n_ctx` positions. For one thread at a time.

    A block with the model's `head` gives logits, every other block the output rows of its last layer. Rows of several
    sequences take less time together than one by one where there are at least `rows_that_pay` of them.
    """

    def __init__(self, model: Model, spec: ContextSpec, *, head: bool, n_params: int = 0) -> None:
        """Reserve the cache. At most `n_batch` rows are computed at once; more are computed one batch after the other.
        `n_params`: the parameters of the whole model, 0 if unknown. A shard is computed as the whole would be, with
        flash attention and as many threads, since these round differently; `reproducible`, also to the bit, with
        padding. Raises InvalidOption, EngineFailed: as for `Context`; ModelUnsupported: it cannot be reproducible."""
        self.head, self._model, self._padding = head, model, spec.padding or Padding()
        self._last = model.n_layer - 1
        capture = None if head else Capture(outputs=(self._last,), stop_after=self._last)
        n_params, hardware = n_params or model.n_params, model.hardware
        chosen = hardware.flash_attn is not None or hardware.cache_type in QUANTISED
        n_batch, room = spec.n_batch or N_BATCH, MOST_PADDING if spec.reproducible else 0
        flash = None if chosen else native.flash_pays(n_params, n_batch, model.offloaded)
        opened = replace(
            spec, n_ctx=spec.n_ctx + room, n_batch=n_batch + room, unified=spec.n_seq == 1, whole_window=True,
            threads=spec.threads or hardware.threads or native.default_threads(n_params),
            flash=False if spec.reproducible else flash, reproducible=False, padding=None,
        )  # fmt: skip
        self._context = Context(model, opened, capture=capture)
        self.rows_that_pay = native.rows_that_pay(model.n_params, model.n_layer, model.offloaded)
        if spec.reproducible and spec.padding is None:
            try:
                self._padding = padding_of(model, self._context.spec, self._fits, head)
            except BaseException:
                self._context.close()
                raise

    def _fits(self, padding: Padding) -> bool:
        """Return whether rows do not depend on those beside them, with this padding. They are small, as embeddings are:
        in large ones, what a layer adds would be rounded away. A single row is always padded: the few layers of a
        block may hide that its attention is another."""
        if padding.least == 1:
            return False
        known = 0.02 * np.random.default_rng(1).standard_normal((TRIED_ROWS, self._model.n_embd), dtype=np.float32)
        spec = ContextSpec(
            TRIED_ROWS, n_batch=TRIED_ROWS, threads=self._context.spec.threads, reproducible=True, padding=padding
        )
        with closing(Block(self._model, spec, head=self.head)) as block:

            def decode(ids: Ids, start: int, outputs: int) -> Floats:
                return block.forward(known[ids], start=start, outputs=outputs)[-outputs:]

            return agree(decode, TRIED_ROWS)

    def forward(self, given: Ids | Floats, *, start: int, seq: int = 0, outputs: int = 0) -> Floats:
        """Compute ids (n,) or rows (n, n_embd) for the positions from `start` on; drop what the cache holds from there.

        Return the logits of the last `outputs` rows, (outputs, n_vocab), or without a head all rows, (n, n_embd). Both
        are valid until the next call. Raises InvalidOption: the cache ends before `start`, or the sequence does not
        exist; ContextFull, EngineFailed: as for `Context.decode`; the cache is as before, up to `start`.
        """
        return self.forward_together((BlockRows(given, start, seq, outputs),))[0]

    def forward_together(self, passages: Sequence[BlockRows]) -> list[Floats]:
        """Compute like `forward` for several sequences, with equally many ids or rows each; return a view for each.

        Sequences with consecutive numbers share a pass. Raises InvalidOption: also where a sequence comes twice, shapes
        differ, or there are more rows than `rows` in all; ContextFull, EngineFailed: as for `forward`, for all
        sequences.
        """
        context, n, most = self._context, len(passages[0].data), self._context.n_batch
        padded = self._padding.rows(n)
        if len(passages) > 1 and (len({one.data.shape for one in passages}) > 1 or padded * len(passages) > most):
            # llama.cpp would compute, and show, rows in another order.
            raise InvalidOption(
                f"{len(passages)} sequences, the first with {n} rows, cannot go through a block together.",
                f"Give the same number of rows of each, and at most {most} in all.",
            )
        for one in passages:
            context.rollback(one.start, one.seq)
        order = sorted(range(len(passages)), key=lambda at: passages[at].seq)
        # llama.cpp's pieces of a batch take consecutive sequences.
        found = context.decode_rows([self._rows(passages[at], padded - n) for at in order])
        if padded > n:
            for one in passages:
                context.rollback(one.start + n, one.seq)
        if self.head:
            ends = [len(rows) - (padded - n) for rows in found]
            found = [rows[end - passages[at].outputs : end] for rows, at, end in zip(found, order, ends, strict=True)]
        else:
            shown = cast(Recorder, context.captured).output(self._last)
            found = [shown[at * padded : at * padded + n] for at in range(len(order))]
        return [found[order.index(at)] for at in range(len(order))]

    def _rows(self, passage: BlockRows, more: int) -> SeqRows:
        """Return a passage with copies of its last row, `more` of them, which have logits if that has any."""
        outputs = passage.outputs if self.head else 0
        if outputs:
            outputs = self._padding.rows(outputs + more)
        data = np.concatenate((passage.data, np.repeat(passage.data[-1:], more, axis=0))) if more else passage.data
        if data.ndim == 1:
            return SeqRows(passage.seq, data.astype(np.int32, copy=False), outputs)
        return SeqRows.of_embedded(data.astype(np.float32, copy=False), passage.seq, outputs)

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._context.length(seq)

    def close(self) -> None:
        """Free the cache's memory."""
        self._context.close()

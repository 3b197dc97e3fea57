"""A few layers of a model as a unit of computation: ids or rows in, rows or logits out.

A stage of a mesh is a chain of blocks, so that its first layers can compute while its last layers still load.
"""

from contextlib import closing
from dataclasses import replace
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


class Block:
    """A shard (`cut`) with a cache of its own for `n_seq` sequences of `n_ctx` positions. For one thread at a time.

    A block with the model's `head` gives logits, every other block the output rows of its last layer.
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
        context, n = self._context, len(given)
        more = self._padding.rows(n) - n
        context.rollback(start, seq)
        (found,) = context.decode_rows([self._rows(given, seq, outputs if self.head else 0, more)])
        if more:
            context.rollback(start + n, seq)
        if self.head:
            end = len(found) - more
            return found[end - outputs : end]
        return cast(Recorder, context.captured).output(self._last)[:n]

    def _rows(self, given: Ids | Floats, seq: int, outputs: int, more: int) -> SeqRows:
        """Return ids or rows with copies of the last, `more` of them, which have logits if that has any."""
        if outputs:
            outputs = self._padding.rows(outputs + more)
        data = np.concatenate((given, np.repeat(given[-1:], more, axis=0))) if more else given
        if data.ndim == 1:
            return SeqRows(seq, data.astype(np.int32, copy=False), outputs)
        return SeqRows.of_embedded(data.astype(np.float32, copy=False), seq, outputs)

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._context.length(seq)

    def close(self) -> None:
        """Free the cache's memory."""
        self._context.close()

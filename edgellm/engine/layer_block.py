"""A few layers of a model as a unit of computation: ids or rows in, rows or logits out.

A stage of a mesh is a chain of blocks, so that its first layers can compute while its last layers still load.
"""

from dataclasses import replace

import numpy as np

from edgellm.engine import native
from edgellm.engine.context import Context
from edgellm.engine.graph_hooks import Capture
from edgellm.engine.hardware import N_BATCH, QUANTISED
from edgellm.engine.kv.row_padding import MOST_PADDING
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
        self.head, last = head, model.n_layer - 1
        n_params, hardware = n_params or model.n_params, model.hardware
        chosen = hardware.flash_attn is not None or hardware.cache_type in QUANTISED
        n_batch = spec.n_batch or N_BATCH
        opened = replace(
            spec, n_batch=n_batch + MOST_PADDING * spec.reproducible, unified=spec.n_seq == 1, whole_window=True,
            threads=spec.threads or hardware.threads or native.default_threads(n_params),
            flash=None if chosen else native.flash_pays(n_params, n_batch, model.offloaded),
        )  # fmt: skip
        self._context = Context(model, opened, capture=None if head else Capture(stop_after=last))

    def forward(self, given: Ids | Floats, *, start: int, seq: int = 0, outputs: int = 0) -> Floats:
        """Compute ids (n,) or rows (n, n_embd) for the positions from `start` on; drop what the cache holds from there.

        Return the logits of the last `outputs` rows, (outputs, n_vocab), or without a head all rows, (n, n_embd). Both
        are valid until the next call. Raises InvalidOption: the cache ends before `start`, or the sequence does not
        exist; ContextFull, EngineFailed: as for `Context.decode`; the cache is as before, up to `start`.
        """
        self._context.rollback(start, seq)
        outputs = outputs if self.head else 0
        if given.ndim == 1:
            found = self._context.decode(given.astype(np.int32, copy=False), seq=seq, outputs=outputs)
        else:
            found = self._context.decode_embeddings(given.astype(np.float32, copy=False), seq=seq, outputs=outputs)
        return found if self.head else self._context.inner_rows(len(given))

    def close(self) -> None:
        """Free the cache's memory."""
        self._context.close()

"""A few layers of a model as a unit of computation: ids or rows in, rows or logits out.

A stage of a mesh is a chain of blocks, so that its first layers can compute while its last layers still load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import native
from edgellm.engine.context import Context
from edgellm.engine.context_spec import ContextSpec
from edgellm.engine.graph_hooks import Capture
from edgellm.engine.hardware import QUANTISED
from edgellm.engine.kv.sequences import SeqRows
from edgellm.engine.model import Model
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import EngineFailed, InvalidOption


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

    def __init__(
        self, model: Model, *, head: bool, n_ctx: int, n_seq: int = 1, rows: int = 256, threads: int | None = None,
        n_params: int = 0,
    ) -> None:  # fmt: skip
        """Reserve the cache. At most `rows` are computed at once; more are computed one batch after the other.
        `n_params`: the parameters of the whole model, 0 if unknown. A shard is computed as the whole would be, with
        flash attention and as many threads, since these round differently. Raises InvalidOption, EngineFailed: as for
        `Context`."""
        self.head = head
        self._last = model.n_layer - 1
        capture = None if head else Capture(outputs=(self._last,), stop_after=self._last)
        n_params, hardware = n_params or model.n_params, model.hardware
        chosen = hardware.flash_attn is not None or hardware.cache_type in QUANTISED
        spec = ContextSpec(
            n_ctx=n_ctx, n_seq=n_seq, n_batch=rows, unified=n_seq == 1, whole_window=True,
            threads=threads or hardware.threads or native.default_threads(n_params),
            flash=None if chosen else native.flash_pays(n_params, rows, model.offloaded),
        )  # fmt: skip
        self._context = Context(model, spec, capture=capture)
        self.rows_that_pay = native.rows_that_pay(model.n_params, model.n_layer, model.offloaded)

    def forward(self, given: Ids | Floats, *, start: int, seq: int = 0, outputs: int = 0) -> Floats:
        """Compute ids (n,) or rows (n, n_embd) for the positions from `start` on; drop what the cache holds from there.

        Return the logits of the last `outputs` rows, (outputs, n_vocab), or without a head all rows, (n, n_embd).
        Both are valid until the next call.

        Raises:
            InvalidOption: the cache ends before `start`, or the sequence does not exist.
            ContextFull, EngineFailed: as for `Context.decode`; the cache is as before, up to `start`.
        """
        return self.forward_together((BlockRows(given, start, seq, outputs),))[0]

    def forward_together(self, passages: Sequence[BlockRows]) -> list[Floats]:
        """Compute like `forward` for several sequences, with equally many ids or rows each; return a view for each.

        Sequences with consecutive numbers share a pass.

        Raises:
            InvalidOption: also where a sequence comes twice, shapes differ, or there are more rows than `rows` in all.
            ContextFull, EngineFailed: as for `forward`, for all sequences.
        """
        context, n, most = self._context, len(passages[0].data), self._context.n_batch
        if len(passages) > 1 and (len({one.data.shape for one in passages}) > 1 or n * len(passages) > most):
            # llama.cpp would compute, and show, rows in another order.
            raise InvalidOption(
                f"{len(passages)} sequences, the first with {n} rows, cannot go through a block together.",
                f"Give the same number of rows of each, and at most {most} in all.",
            )
        for one in passages:
            context.rollback(one.start, one.seq)
        order = sorted(range(len(passages)), key=lambda at: passages[at].seq)
        # llama.cpp's pieces of a batch take consecutive sequences.
        found = context.decode_rows([self._rows(passages[at]) for at in order])
        if not self.head:
            if context.captured is None:
                raise EngineFailed("The block captured no rows.", "Report this.")
            shown = context.captured.output(self._last)
            found = [shown[at * n : (at + 1) * n] for at in range(len(order))]
        return [found[order.index(at)] for at in range(len(order))]

    def _rows(self, passage: BlockRows) -> SeqRows:
        outputs = passage.outputs if self.head else 0
        if passage.data.ndim == 1:
            return SeqRows(passage.seq, passage.data.astype(np.int32, copy=False), outputs)
        return SeqRows.of_embedded(passage.data.astype(np.float32, copy=False), passage.seq, outputs)

    @property
    def threads(self) -> int:
        """The threads that compute."""
        return self._context.spec.native.threads

    def length(self, seq: int = 0) -> int:
        """Return the number of positions in a sequence's cache."""
        return self._context.length(seq)

    def clear(self, seq: int = 0) -> None:
        """Empty a sequence."""
        self._context.clear(seq)

    def close(self) -> None:
        """Free the cache's memory."""
        self._context.close()

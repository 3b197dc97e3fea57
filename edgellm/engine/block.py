"""A few layers of a model that compute by themselves: ids or rows in, rows or logits out.

A stage of a mesh is a chain of such blocks, so that its first layers can compute while its last ones still load.
"""

from __future__ import annotations

from edgellm.engine.capture import Capture
from edgellm.engine.context import Context
from edgellm.engine.model import Model
from edgellm.engine.types import Floats, Ids
from edgellm.errors import EngineFailed


class Block:
    """A shard (`cut`) with a cache of its own for `n_seq` sequences of `n_ctx` positions. For one thread at a time.

    A block with the model's `head` gives logits, every other one the rows that come out of its last layer.
    """

    def __init__(
        self, model: Model, *, head: bool, n_ctx: int, n_seq: int = 1, rows: int = 256, threads: int | None = None
    ) -> None:
        """Reserves the cache. `rows` are computed at once at most; more are computed one batch after the other.

        Raises:
            InvalidOption, EngineFailed: as for `Context`.
        """
        self.head = head
        self._last = model.n_layer - 1
        capture = None if head else Capture(outputs=(self._last,), stop_after=self._last)
        self._context = Context(
            model, n_ctx=n_ctx, n_seq=n_seq, n_batch=rows, threads=threads, unified=n_seq == 1, capture=capture
        )

    def forward(self, given: Ids | Floats, *, start: int, seq: int = 0, outputs: int = 0) -> Floats:
        """Computes ids (n,) or rows (n, n_embd) for the positions from `start` on, where what is cached is dropped.

        Returns the logits of the last `outputs`, (outputs, n_vocab), or without a head the rows of all, (n, n_embd).
        Both are valid until the next call.

        Raises:
            InvalidOption: the cache ends before `start`, or the sequence does not exist.
            ContextFull, EngineFailed: as for `Context.decode`; the cache is as it was, but for what was dropped.
        """
        context = self._context
        context.rollback(start, seq)
        outputs = outputs if self.head else 0
        if given.ndim == 1:
            logits = context.decode(given.astype("int32", copy=False), seq=seq, outputs=outputs)
        else:
            logits = context.decode_embeddings(given.astype("float32", copy=False), seq=seq, outputs=outputs)
        if self.head:
            return logits
        if context.captured is None:
            raise EngineFailed("The block shows no rows.", "Report this.")
        return context.captured.output(self._last)

    def length(self, seq: int = 0) -> int:
        """Positions in a sequence's cache."""
        return self._context.length(seq)

    def clear(self, seq: int = 0) -> None:
        """Forgets a sequence."""
        self._context.clear(seq)

    def close(self) -> None:
        """Gives the cache's memory back."""
        self._context.close()

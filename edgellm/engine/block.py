"""A few layers of a model that compute by themselves: ids or rows in, rows or logits out.

A stage of a mesh is a chain of such blocks, so that its first layers can compute while its last ones still load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine.batch import SeqRows
from edgellm.engine.capture import Capture
from edgellm.engine.context import NO_ID, Context
from edgellm.engine.model import Model
from edgellm.engine.types import Floats, Ids
from edgellm.errors import EngineFailed, InvalidOption


@dataclass(frozen=True, slots=True)
class Passage:
    """Ids (n,) or rows (n, n_embd) of a sequence for a block, as for `Block.forward`."""

    data: Ids | Floats
    start: int
    seq: int
    outputs: int = 0


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
        return self._shown()

    def forward_together(self, passages: Sequence[Passage]) -> list[Floats]:
        """Like `forward`, for several sequences in one batch: of each equally many ids, or rows. One view for each.

        They share a pass where their numbers follow each other; else each has its own.

        Raises:
            InvalidOption: also where a sequence comes twice, they have different shapes, or exceed `rows`.
            ContextFull, EngineFailed: as for `forward`, for all of them.
        """
        if len(passages) == 1:
            (one,) = passages
            return [self.forward(one.data, start=one.start, seq=one.seq, outputs=one.outputs)]
        context, n, most = self._context, len(passages[0].data), self._context.n_batch
        if len({one.data.shape for one in passages}) != 1 or n * len(passages) > most:
            # llama.cpp would compute, and show, rows in another order
            raise InvalidOption(
                f"{len(passages)} sequences, the first of {n} rows, do not go through a block together.",
                f"Give equally many rows of each, and {most} in all.",
            )
        order = sorted(
            range(len(passages)), key=lambda at: passages[at].seq
        )  # each piece that llama.cpp makes takes a run of them
        ordered = [passages[at] for at in order]
        for one in ordered:
            context.rollback(one.start, one.seq)
        data = np.concatenate([one.data for one in ordered])
        embedded = None if data.ndim == 1 else data
        ids = data.astype(np.int32, copy=False) if embedded is None else np.full(len(data), NO_ID, dtype=np.int32)
        rows = [
            SeqRows(one.seq, ids[at * n : (at + 1) * n], one.outputs if self.head else 0)
            for at, one in enumerate(ordered)
        ]
        found = context.decode_rows(rows, embedded)
        if not self.head:
            shown = self._shown()
            found = [shown[at * n : (at + 1) * n] for at in range(len(ordered))]
        return [found[order.index(at)] for at in range(len(order))]

    def _shown(self) -> Floats:
        """The rows that came out of the last layer."""
        if self._context.captured is None:
            raise EngineFailed("The block shows no rows.", "Report this.")
        return self._context.captured.output(self._last)

    def length(self, seq: int = 0) -> int:
        """Positions in a sequence's cache."""
        return self._context.length(seq)

    def clear(self, seq: int = 0) -> None:
        """Forgets a sequence."""
        self._context.clear(seq)

    def close(self) -> None:
        """Gives the cache's memory back."""
        self._context.close()

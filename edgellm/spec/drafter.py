"""A small model as the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.engine import Context, Floats, Model, SeqRows, top2, top_k
from edgellm.spec.drafting import Drafting, Meter
from edgellm.spec.records import Chunk, Ids, Sampling


class ModelDrafter:
    """Drafts with a model of its own. The context is the drafter's alone, and is closed with it.

    The reply is in its sequence 0; where it has others, `draft_many` uses them for branches.
    """

    def __init__(self, model: Model, context: Context, layers: tuple[int, ...] = (), alternatives: int = 0) -> None:
        """`layers`: whose attention is the importance of drafted tokens. The context must capture it, and rows are read
        while tokens are drafted only. `alternatives`: how many a chunk holds for each of its places.

        Raises:
            InvalidOption: the context does not capture these layers.
        """
        self._model = model
        self._context = context
        self._meter = Meter(context, layers)
        self._alternatives = alternatives
        self.doubt = 0.0  # a chunk ends behind a token of less confidence; set for a reply
        self._branches = 0  # sequences 1 to this hold what was drafted ahead

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """See `Drafter.draft`. The last token of a chunk is not decoded before a later prefix holds it."""
        drafting = Drafting(len(prefix), gamma, sampling, self._alternatives, self.doubt)
        try:
            self._meter.rest()
            self._take_over(prefix)
            logits = self._context.decode(prefix[self._context.sync(prefix) :])[0]
            self._meter.start(len(prefix), gamma)
            while True:
                token = drafting.add(logits, top2(logits))
                if drafting.full() or self._model.is_eog(token):
                    break
                logits = self._context.decode(np.array([token], dtype=np.int32))[0]
                self._meter.look()
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._clear()
            raise
        return drafting.chunk(self._meter.importance())

    @property
    def room(self) -> int:
        """How many prefixes `draft_many` can follow at once."""
        return self._context.n_seq - 1

    def candidates(self, prefix: Ids, k: int) -> tuple[Ids, Floats]:
        """The `k` likeliest next tokens and their probabilities, likeliest first; both (k,)."""
        try:
            self._meter.rest()
            return top_k(self._context.decode(prefix[self._context.sync(prefix) :])[0], k)
        except BaseException:
            self._clear()
            raise

    def draft_many(
        self, prefixes: Sequence[Ids], gamma: int, sampling: Sampling, until: Callable[[], bool]
    ) -> list[Chunk]:
        """Up to `gamma` tokens behind each of at most `room` prefixes, in one batch a token, until `until` says stop.

        Fewer where the context ends. The next `draft` behind one of them goes on from what is computed here. Importance
        is not measured.
        """
        context = self._context
        fits = [min(gamma, context.n_ctx - len(prefix) + 1) for prefix in prefixes]
        under_way = [
            Drafting(len(prefix), n, sampling, self._alternatives, self.doubt)
            for prefix, n in zip(prefixes, fits, strict=True)
        ]
        try:
            self._meter.rest()
            rows = []
            for seq, prefix in enumerate(prefixes, 1):
                if fits[seq - 1] < 1:
                    continue
                context.branch(0, seq)
                rows.append(SeqRows(seq, prefix[context.sync(prefix, seq) :], 1))
            self._branches = max(self._branches, len(prefixes))
            while rows and not until():
                logits, after = context.decode_rows(rows), []
                for row, view in zip(rows, logits, strict=True):
                    drafting = under_way[row.seq - 1]
                    token = drafting.add(view[0], top2(view[0]))
                    if not drafting.full() and not self._model.is_eog(token):
                        after.append(SeqRows(row.seq, np.array([token], dtype=np.int32), 1))
                rows = after
        except BaseException:
            self._clear()
            raise
        return [drafting.chunk(None) for drafting in under_way]

    def _take_over(self, prefix: Ids) -> None:
        """Makes the branch that has most of `prefix` the reply's sequence, and drops the others."""
        if not self._branches:
            return
        best = max(range(self._branches + 1), key=lambda seq: _in_common(self._context.cached(seq), prefix))
        if best:
            self._context.branch(best, 0)
        for seq in range(1, self._branches + 1):
            self._context.clear(seq)
        self._branches = 0

    def _clear(self) -> None:
        for seq in range(self._branches + 1):
            self._context.clear(seq)
        self._branches = 0

    def close(self) -> None:
        self._context.close()


def _in_common(cached: Ids, prefix: Ids) -> int:
    """How many tokens both begin with."""
    n = min(len(cached), len(prefix))
    differ = cached[:n] != prefix[:n]
    return int(differ.argmax()) if differ.any() else n

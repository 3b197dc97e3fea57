"""A small model as the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from edgellm.engine import Context, Model, SeqRows, common_prefix, top2
from edgellm.spec.drafters.chunk_builder import Drafting, Meter
from edgellm.spec.drafters.verdict_prediction import likeliest
from edgellm.spec.ngram.context_lookup import Precedents, said_before
from edgellm.spec.protocols import Suggests
from edgellm.spec.types import NO_IDS, Chunk, Floats, Ids, Sampling


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
        self.alone = False  # nobody verifies this reply; set for it
        self.suggests: Suggests | None = None  # set for a reply, too
        self.floors: Sequence[float] = ()  # what a suggested token's chance must be, by its place in a decode
        self.least: Callable[[], Sequence[float]] = tuple  # what a chunk's chance must be, by its length
        self.precedents: Precedents | None = None  # of the reply, where it heeds the context; set for it
        self.hesitates = 0.0  # below this confidence it takes what the context says
        self._branches = 0  # sequences 1 to this hold what was drafted ahead

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """See `Drafter.draft`. The last token of a chunk is not decoded before a later prefix holds it.

        What `suggests` says is decoded in one batch, and stands as far as the model chooses it itself: the chunk is the
        same, and sooner there.
        """
        drafting = Drafting(
            len(prefix), gamma, sampling, self._alternatives, self.doubt, self.least(), self.alone,
            said_before(self.precedents, prefix), self.hesitates, self._known(prefix),
        )  # fmt: skip
        try:
            self._meter.rest()
            self._take_over(prefix)
            feed = prefix[self._context.sync(prefix) :]
            while True:
                guess = self._guess(prefix, drafting)
                rows = self._context.decode_late(np.append(feed, guess) if guess else feed, outputs=len(guess) + 1)
                self._meter.look() if drafting.ids else self._meter.start(len(prefix), gamma)
                for row, follows in zip_longest(rows, guess):
                    token = drafting.add(row, top2(row))
                    over = drafting.full() or self._model.is_eog(token)
                    if over or token != follows:
                        break
                if over:
                    break
                self._context.rollback(len(prefix) + len(drafting.ids) - 1)  # to what was guessed rightly
                feed = np.array([token], dtype=np.int32)
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._clear()
            raise
        return drafting.chunk(self._meter.importance())

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """See `Heeds`. Set for a reply."""
        self._context.heed(stopped)

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """See `Context.fill`. Set for a reply."""
        self._context.fill(widths, heads)

    def _guess(self, prefix: Ids, drafting: Drafting) -> Sequence[int]:
        """What may come next, to be decoded along with what is decoded anyway."""
        if self.suggests is None or self._meter.measures:
            return []
        drafted = drafting.ids
        return self.suggests.suggest(prefix, drafted, self.floors[: drafting.left - 1]) if drafting.left > 1 else []

    def importance_by_layer(self, n: int) -> Floats | None:
        """Of the first `n` tokens of the last chunk, (layers, n); None where it is not measured."""
        return self._meter.by_layer(n)

    @property
    def room(self) -> int:
        """How many prefixes `draft_many` can follow at once."""
        return self._context.n_seq - 1

    def draft_many(
        self,
        prefixes: Sequence[Ids],
        gamma: int,
        sampling: Sampling,
        until: Callable[[], bool],
        *,
        whole: Ids,
        tail: int,
    ) -> list[tuple[Ids, Chunk]]:
        """Drafts behind several prefixes at once, in one batch a token, until `until` says stop.

        These are `prefixes`, and `whole` with each of its `tail` likeliest next tokens (fewer where one ends the turn),
        at most `room` in all. Returns each with up to `gamma` tokens behind it, fewer where the context ends; doubt
        ends none of them, for there is time. The next `draft` behind one of them goes on from what is computed here.
        Importance is not measured.
        """
        try:
            self._meter.rest()
            self._take_over(whole)  # it may have been drafted ahead, and be verified before anything else is drafted
            return self._branch(prefixes, gamma, sampling, until, whole, tail)
        except BaseException:
            self._clear()
            raise

    def _branch(
        self, prefixes: Sequence[Ids], gamma: int, sampling: Sampling, until: Callable[[], bool], whole: Ids, tail: int
    ) -> list[tuple[Ids, Chunk]]:
        context, known, rows = self._context, self._known(whole), []
        branches: list[tuple[Ids, Drafting]] = []  # the one of sequence i + 1

        def begin(prefix: Ids) -> None:
            fits = min(gamma, context.n_ctx - len(prefix) + 1)
            said = said_before(self.precedents, prefix, stands=False)
            drafting = Drafting(
                len(prefix), fits, sampling, self._alternatives, cursor=said, hesitates=self.hesitates, known=known
            )
            branches.append((prefix, drafting))
            self._branches = max(self._branches, len(branches))
            if fits > 0:
                context.branch(0, len(branches))
                rows.append(SeqRows(len(branches), prefix[context.sync(prefix, len(branches)) :], 1))

        for prefix in prefixes:
            begin(prefix)
        if tail:
            rows.append(SeqRows(0, whole[context.sync(whole) :], 1))
        while rows and not until():
            decoded, rows[:] = list(rows), []
            for row, view in zip(decoded, context.decode_rows(decoded), strict=True):
                if row.seq:
                    drafting = branches[row.seq - 1][1]
                    token = drafting.add(view[0], top2(view[0]))
                    if not drafting.full() and not self._model.is_eog(token):
                        rows.append(SeqRows(row.seq, np.array([token], dtype=np.int32), 1))
                    continue
                for token in likeliest(view[0], tail, known)[0].tolist():
                    if not self._model.is_eog(token):
                        begin(np.append(whole, token).astype(np.int32))
        return [(prefix, drafting.chunk(None)) for prefix, drafting in branches]

    def _known(self, text: Ids) -> Ids:
        """The tokens that stand in a text, ascending, where that is to be known."""
        return np.unique(text) if self._alternatives else NO_IDS

    def _take_over(self, prefix: Ids) -> None:
        """Makes the branch that has most of `prefix` the reply's sequence, and drops the others."""
        if not self._branches:
            return
        best = max(range(self._branches + 1), key=lambda seq: common_prefix(self._context.cached(seq), prefix))
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

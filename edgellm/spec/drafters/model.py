"""A small model as the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from edgellm.engine import Context, Model, SeqRows, common_prefix, top2
from edgellm.spec.draft_length import CostCurve, floors
from edgellm.spec.drafters.chunk_builder import ChunkBuilder, Meter
from edgellm.spec.drafters.verdict_prediction import likeliest
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import NOT_FILLED, GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Floats, Ids


class ModelDrafter(Drafter):
    """Drafts with a model of its own. The context is the drafter's alone, and is closed with it.

    The reply is in its sequence 0; where it has others, `draft_many` uses them for branches.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        layers: tuple[int, ...] = (),
        alternatives: int = 0,
        curve: Callable[[], CostCurve] | None = None,
    ) -> None:
        """Take over `context`. The attention of `layers` is the importance of drafted tokens: the context must capture
        it, and rows are read only while tokens are drafted. `alternatives`: how many a chunk holds for each of its
        places. `curve` returns the times of the context's decodes, and is called where suggestions are tried; without
        it none are.

        Raises:
            InvalidOption: the context does not capture these layers.
        """
        self._model = model
        self._context = context
        self._meter = Meter(context, layers)
        self._alternatives = alternatives
        self._curve = curve
        self._floors: Sequence[float] = ()  # the least chance of a suggested token, by its place in a decode
        self._branches = 0  # sequences 1 to this number hold drafts made ahead

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`."""
        self._context.heed(state.stopped)
        self._floors, filling = (), NOT_FILLED
        if state.suggestions is not None and self._curve is not None:
            curve = self._curve()
            self._floors, filling = floors(curve), curve.filling()
        self._context.fill(*filling)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`. The last token of a chunk is not decoded before a later text holds it.

        Suggested tokens are decoded in one batch, and stand as far as the model itself chooses them: the chunk is the
        same, and ready sooner.
        """
        prefix = state.ids
        chunk = ChunkBuilder(
            state, gamma, self._alternatives, cursor=state.lookup(prefix), known=self._known(prefix),
            floors=state.suggestions.floors() if state.suggestions is not None and state.rules.while_it_pays else (),
        )  # fmt: skip
        try:
            self._meter.rest()
            self._take_over(prefix)
            feed = prefix[self._context.sync(prefix) :]
            while True:
                guess = self._guess(state, chunk)
                rows = self._context.decode_late(np.append(feed, guess) if guess else feed, outputs=len(guess) + 1)
                self._meter.look() if chunk.ids else self._meter.start(len(prefix), gamma)
                for row, follows in zip_longest(rows, guess):
                    token = chunk.add(row, top2(row))
                    over = chunk.full() or self._model.is_eog(token)
                    if over or token != follows:
                        break
                if over:
                    break
                self._context.rollback(len(prefix) + len(chunk.ids) - 1)  # to the last token that was guessed right
                feed = np.array([token], dtype=np.int32)
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._clear()
            raise
        return chunk.build(self._meter.importance())

    def end(self) -> None:
        """See `Drafter.end`."""
        self._context.heed(None)

    def _guess(self, state: GenerationState, chunk: ChunkBuilder) -> Sequence[int]:
        """Return tokens that may come next, to be decoded along with those that are decoded anyway."""
        if state.suggestions is None or self._meter.measures or chunk.left < 2:
            return []
        return state.suggestions.suggest(state, chunk.ids, self._floors[: chunk.left - 1])

    def importance_by_layer(self, n: int) -> Floats | None:
        """Return the importance of the first `n` tokens of the last chunk, (layers, n); None if it is not measured."""
        return self._meter.by_layer(n)

    @property
    def room(self) -> int:
        """Return how many prefixes `draft_many` can follow at once."""
        return self._context.n_seq - 1

    def draft_many(
        self,
        state: GenerationState,
        prefixes: Sequence[Ids],
        gamma: int,
        until: Callable[[], bool],
        *,
        whole: Ids,
        tail: int,
    ) -> list[tuple[Ids, Chunk]]:
        """Draft behind several prefixes at once, in one batch a token, until `until` says stop.

        These are `prefixes`, and `whole` with each of its `tail` likeliest next tokens (fewer where one ends the turn),
        at most `room` in all. Return each with up to `gamma` tokens behind it, fewer where the context ends; doubt
        ends none of them, for there is time. The next `propose` behind one of them goes on from what is computed here.
        Importance is not measured.
        """
        try:
            self._meter.rest()
            self._take_over(whole)  # it may have been drafted ahead, and be verified before anything else is drafted
            return self._branch(state, prefixes, gamma, until, whole, tail)
        except BaseException:
            self._clear()
            raise

    def _branch(
        self, state: GenerationState, prefixes: Sequence[Ids], gamma: int, until: Callable[[], bool], whole: Ids,
        tail: int,
    ) -> list[tuple[Ids, Chunk]]:  # fmt: skip
        context, known, rows = self._context, self._known(whole), []
        branches: list[tuple[Ids, ChunkBuilder]] = []  # branch i is sequence i + 1

        def begin(prefix: Ids) -> None:
            fits = min(gamma, context.n_ctx - len(prefix) + 1)
            cursor = state.lookup(prefix, stands=False)
            chunk = ChunkBuilder(
                state, fits, self._alternatives, position=len(prefix), cursor=cursor, known=known, stops=False
            )
            branches.append((prefix, chunk))
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
                    chunk = branches[row.seq - 1][1]
                    token = chunk.add(view[0], top2(view[0]))
                    if not chunk.full() and not self._model.is_eog(token):
                        rows.append(SeqRows(row.seq, np.array([token], dtype=np.int32), 1))
                    continue
                for token in likeliest(view[0], tail, known)[0].tolist():
                    if not self._model.is_eog(token):
                        begin(np.append(whole, token).astype(np.int32))
        return [(prefix, chunk.build(None)) for prefix, chunk in branches]

    def _known(self, text: Ids) -> Ids:
        """Return the distinct tokens of a text, ascending, if alternatives need them."""
        return np.unique(text) if self._alternatives else NO_IDS

    def _take_over(self, prefix: Ids) -> None:
        """Make the branch that shares most of `prefix` the reply's sequence, and drop the others."""
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

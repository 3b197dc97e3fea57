"""A draft model as the drafter: choosing a chunk's tokens, and measuring the attention of later tokens to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.engine import Context, Model, Recorder, SeqRows, Top2, common_prefix, top2, top2_of_rows
from edgellm.errors import InvalidOption
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.drafters.importance import ColumnSums
from edgellm.spec.drafters.verdict_prediction import likely_corrections
from edgellm.spec.ngram.sources import MIN_MATCH, NO_CURSOR, Cursor
from edgellm.spec.protocols import Drafter
from edgellm.spec.sampling import distribution, draw, penalised
from edgellm.spec.state import NOT_FILLED, GenerationState
from edgellm.spec.types import NO_FLOATS, Chunk, ContextMatch, Floats, Ids, Penalties

_NO_KEYS = slice(0, 0)


class ChunkBuilder:
    """A chunk under way: chooses each token from its logits, and records the facts about it."""

    def __init__(
        self,
        state: GenerationState,
        gamma: int,
        *,
        keeps_logits: bool = False,
        text: Ids | None = None,
        penalties: Penalties | None = None,
        grammar: ReplyGrammar | None = None,
        cursor: Cursor = NO_CURSOR,
        floors: Sequence[float] = (),
        stops_early: bool = True,
    ) -> None:
        """Begin a chunk of up to `gamma` tokens after `text` (by default the reply so far), by `penalties` and
        `grammar`.

        The chunk has a copy of each token's logits if it `keeps_logits`. It keeps to `state.rules`; without
        `stops_early` it never ends for low confidence. It also ends where the product of the confidences falls below
        the entry of `floors` for that place. `cursor` offers the context's tokens.
        """
        rules, sampling = state.rules, state.sampling
        self._survival, self._floors = 1.0, floors
        self._gamma, self._stop_below = gamma, rules.stop_below if stops_early else 0.0
        self._draws = not (sampling.greedy or rules.greedy)
        self._sampling = sampling
        self._text, self._penalties = state.ids if text is None else text, penalties
        self._grammar, self._cursor, self._lookup_below = grammar, cursor, rules.lookup_below
        self._matches: list[tuple[int, int, bool]] = []
        self.ids: list[int] = []
        self._facts: list[Top2] = []
        self._exits: list[int | None] = []
        self._logits: list[Floats] | None = [] if keeps_logits else None

    def add(self, logits: Floats, facts: Top2, exit_layer: int | None = None) -> int:
        """Add the next token, chosen from `logits` (n_vocab,), whose top two are `facts`, and return it."""
        if self._penalties is not None:
            text = np.concatenate((self._text, np.array(self.ids, dtype=np.int32)))
            logits = penalised(logits, text, self._penalties)
            facts = top2(logits)
        if self._grammar is not None:
            text = np.concatenate((self._text, np.array(self.ids, dtype=np.int32)))
            if not self._grammar.follows(text, np.array([facts.id], dtype=np.int32)):
                facts = top2(self._grammar.masked(logits, text))
        token = facts.id
        if self._draws:
            token = self._drawn(logits)
        if self._cursor is not NO_CURSOR:
            token = self._look_up(token, facts.p1)
        self.ids.append(token)
        self._facts.append(facts)
        self._survival *= facts.p1
        self._exits.append(exit_layer)
        if self._logits is not None:
            self._logits.append(logits.copy())
        return token

    def _drawn(self, logits: Floats) -> int:
        """Return the token drawn at this place, as the verifier would draw it from the same logits."""
        found = distribution(logits, self._sampling)
        if self._grammar is not None:
            text = np.concatenate((self._text, np.array(self.ids, dtype=np.int32)))
            found = self._grammar.limited(found, logits, text)
        return draw(found, self._sampling.seed, len(self._text) + len(self.ids))

    def _look_up(self, token: int, confidence: float) -> int:
        """Return `token`, or the context's token if the model is not confident."""
        offered, matched, _ = self._cursor.offer()
        differs = offered >= 0 and offered != token and matched >= MIN_MATCH
        copied = differs and confidence < self._lookup_below and self._grammar is None
        if copied:
            token = offered
        self._matches.append((offered, matched, copied))
        self._cursor.advance(token)
        return token

    @property
    def left(self) -> int:
        """Return how many tokens the chunk may still get."""
        return self._gamma - len(self.ids)

    def full(self) -> bool:
        at = len(self.ids)
        if at >= self._gamma:
            return True
        if self._facts[-1].p1 < self._stop_below and not (self._matches and self._matches[-1][2]):
            return True
        return at <= len(self._floors) and self._survival < self._floors[at - 1]

    def build(self, importance: Floats | None, exits: bool = False) -> Chunk:
        """Return the finished chunk; `exits`: its drafter may skip layers."""
        n = len(self.ids)
        return Chunk(
            ids=np.array(self.ids, dtype=np.int32),
            confidence=np.fromiter((f.p1 for f in self._facts), np.float32, n),
            margin=np.fromiter((f.p1 - f.p2 for f in self._facts), np.float32, n),
            importance=NO_FLOATS if importance is None else importance[:n],
            exit_layers=tuple(self._exits) if exits else None,
            logits=None if self._logits is None else tuple(self._logits),
            context_match=self._context_match(),
        )

    def _context_match(self) -> ContextMatch | None:
        if not self._matches:
            return None
        offered, matched, copied = zip(*self._matches, strict=True)
        return ContextMatch(np.array(offered, np.int32), np.array(matched, np.int32), np.array(copied, np.bool_))


def within(ids: Ids, shared: int | None) -> Ids:
    """Return `ids` (n,) for a model that has only tokens below `shared`: all others become 0."""
    return ids if shared is None else np.where(ids < shared, ids, 0).astype(np.int32)


class AttentionMeter:
    """A meter of importance from the attention that a context captures, only while drafting."""

    def __init__(self, context: Context, layers: tuple[int, ...]) -> None:
        """Measure at `layers` of `context`'s model, counted from 0; without any, nothing is measured.

        Raises:
            InvalidOption: the context does not capture these layers.
        """
        recorder = context.captured
        shown = () if recorder is None else recorder.capture.attention
        if missing := [layer for layer in layers if layer not in shown]:
            raise InvalidOption(
                f"The context does not capture the attention of layer {missing[0]}.",
                f"Open it with Capture(attention={layers}).",
            )
        self._layers = layers
        self._recorder: Recorder | None = recorder
        self._sums: ColumnSums | None = None
        self._n = 0
        self._cells: list[int] = []  # cells of the chunk's tokens, where sequences share cells
        self._before = np.empty(0, dtype=np.bool_)

    def pause(self) -> None:
        """Record no attention of the tokens decoded from here on (a prefill)."""
        if self._recorder is not None:
            self._recorder.attend(_NO_KEYS if self._recorder.shared and self._layers else None)

    def start(self, position: int, gamma: int) -> None:
        """Begin a chunk of up to `gamma` tokens at `position`; everything before it has just been decoded."""
        self._n = gamma
        if self._recorder is not None and self._layers:
            self._sums = ColumnSums(gamma, len(self._layers))
            self._cells = []
            self._before = self._recorder.visible()
            self._recorder.attend(slice(None) if self._recorder.shared else slice(position, position + gamma))

    def record(self) -> None:
        """Record the attention of the chunk's next token, which has been decoded."""
        if self._recorder is None or self._sums is None:
            return
        rows = [self._recorder.attention(layer) for layer in self._layers]
        if self._recorder.shared:  # The chunk's tokens lie anywhere.
            now = self._recorder.visible()
            (new,) = set(np.flatnonzero(now)) - set(np.flatnonzero(self._before))
            self._cells.append(int(new))
            self._before = now
            rows = [layer[:, :, self._cells] for layer in rows]
        self._sums.add(rows)

    def importance(self) -> Floats | None:
        """Return the importance of the chunk's tokens, (gamma,), unfilled places included; None if not measured."""
        return None if self._sums is None else self._sums.importance(self._n)

    def by_layer(self, n: int) -> Floats | None:
        """Return the importance of the chunk's first `n` tokens in each layer, (layers, n); None if not measured."""
        return None if self._sums is None else self._sums.by_layer(n)


class ModelDrafter(Drafter):
    """A drafter with a model. The context is the drafter's own, and is closed with it.

    The reply is in sequence 0 of the context; `draft_many` uses further sequences for branches.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        layers: tuple[int, ...] = (),
        keeps_logits: bool = False,
        shared: int | None = None,
    ) -> None:
        """Take over `context`. The attention of `layers` is the importance of drafted tokens: the context must capture
        it, and rows are read only while tokens are drafted. `keeps_logits`: chunks have them. Only ids below `shared`
        are drafted, where the verifier's vocabulary has another length.

        Raises:
            InvalidOption: the context does not capture these layers.
        """
        self._model = model
        self._context = context
        self._meter = AttentionMeter(context, layers)
        self._keeps_logits = keeps_logits
        self._shared = shared
        self._branches = 0  # number of the last sequence with a branch

    def begin(self, state: GenerationState) -> None:
        self._context.set_cancel(state.should_stop, state.prompt_progress(self._model.name))
        self._context.fill(*NOT_FILLED)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk. Its last token is decoded only with a later text that contains it."""
        prefix = within(state.ids, self._shared)
        chunk = ChunkBuilder(
            state, gamma, keeps_logits=self._keeps_logits, penalties=state.sampling.penalties, grammar=state.grammar,
            cursor=state.lookup(prefix), floors=state.rules.floors(),
        )  # fmt: skip
        try:
            self._meter.pause()
            self._take_over(prefix)
            feed = prefix[self._context.sync(prefix) :]
            while True:
                row = self._context.decode(feed)[-1, : self._shared]
                self._meter.record() if chunk.ids else self._meter.start(len(prefix), gamma)
                token = chunk.add(row, top2(row))
                if chunk.full() or self._model.is_eog(token):
                    break
                feed = np.array([token], dtype=np.int32)
        except BaseException:  # An interrupted decode leaves an invalid cache.
            self._clear()
            raise
        return chunk.build(self._meter.importance())

    def end(self) -> None:
        self._context.set_cancel(None)

    def importance_by_layer(self, n: int) -> Floats | None:
        """Return the importance of the first `n` tokens of the last chunk, (layers, n); None if it is not measured."""
        return self._meter.by_layer(n)

    @property
    def max_branches(self) -> int:
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
        """Draft after several prefixes in one batch per token, until `until` returns True.

        The prefixes are `prefixes`, and `whole` with each of its `tail` likeliest next tokens (without tokens that end
        the turn, or are in `prefixes`), at most `max_branches` in all. Return each with up to `gamma` drafted tokens,
        fewer where the context ends, but not for low confidence. The next `propose` after such a prefix continues from
        its cache. Importance is not measured.
        """
        try:
            self._meter.pause()
            # `whole` may have been drafted ahead, and be verified before anything else is drafted.
            self._take_over(within(whole, self._shared))
            return self._draft_branches(state, prefixes, gamma, until, whole, tail)
        except BaseException:
            self._clear()
            raise

    def _draft_branches(
        self, state: GenerationState, prefixes: Sequence[Ids], gamma: int, until: Callable[[], bool], whole: Ids,
        tail: int,
    ) -> list[tuple[Ids, Chunk]]:  # fmt: skip
        context, known, rows = self._context, np.unique(within(whole, self._shared)), []
        branches: list[tuple[Ids, ChunkBuilder]] = []  # Branch i is sequence i + 1.

        def begin(prefix: Ids) -> None:
            length = min(gamma, context.n_ctx - len(prefix) + 1)
            cursor = state.lookup(prefix, committed=False)
            chunk = ChunkBuilder(
                state, length, keeps_logits=self._keeps_logits, text=prefix, penalties=state.sampling.penalties,
                grammar=state.grammar, cursor=cursor, stops_early=False,
            )  # fmt: skip
            branches.append((prefix, chunk))
            self._branches = max(self._branches, len(branches))
            if length > 0:
                context.branch(0, len(branches))
                own = within(prefix, self._shared)
                rows.append(SeqRows(len(branches), own[context.sync(own, len(branches)) :], 1))

        taken = {int(prefix[len(whole)]) for prefix in prefixes if len(prefix) > len(whole)}
        for prefix in prefixes:  # Sequence 0 still has the tokens drafted behind `whole`.
            begin(prefix)
        if tail:
            own = within(whole, self._shared)
            rows.append(SeqRows(0, own[context.sync(own) :], 1))
        while rows and not until():
            decoded, rows[:] = list(rows), []
            logits = [view[0][: self._shared] for view in context.decode_rows(decoded)]
            for fed, row, facts in zip(decoded, logits, top2_of_rows(logits), strict=True):
                if fed.seq:
                    chunk = branches[fed.seq - 1][1]
                    token = chunk.add(row, facts)
                    if not chunk.full() and not self._model.is_eog(token):
                        rows.append(SeqRows(fed.seq, np.array([token], dtype=np.int32), 1))
                    continue
                for token in likely_corrections(row, facts.p1, tail, known)[0].tolist():
                    if token not in taken and not self._model.is_eog(token):
                        begin(np.append(whole, token).astype(np.int32))
        return [(prefix, chunk.build(None)) for prefix, chunk in branches]

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

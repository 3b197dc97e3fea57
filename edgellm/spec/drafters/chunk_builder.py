"""The common part of drafters that run a model: choosing a chunk's tokens, and measuring what later tokens attend
to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engine import Context, Recorder, Top2
from edgellm.errors import InvalidOption
from edgellm.spec.drafters.importance import ColumnSums
from edgellm.spec.drafters.verdict_prediction import likeliest
from edgellm.spec.ngram.context_lookup import MATCHED
from edgellm.spec.ngram.sources import SILENT, Cursor
from edgellm.spec.sampling import Purpose, distribution, draw, exact_distribution, uniforms
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_FLOATS, NO_IDS, Chunk, Distribution, Floats, Ids, Precedent

_NO_KEYS = slice(0, 0)


class ChunkBuilder:
    """A chunk under way: chooses each token from its logits, and records the facts about it."""

    def __init__(
        self,
        state: GenerationState,
        gamma: int,
        alternatives: int = 0,
        *,
        position: int | None = None,
        cursor: Cursor = SILENT,
        known: Ids = NO_IDS,
        floors: Sequence[float] = (),
        stops: bool = True,
    ) -> None:
        """Begin a chunk of up to `gamma` tokens from `position` on (by default the end of the reply), with
        `alternatives` for each, where the `known` tokens of the text so far count as likelier
        (`verdict_prediction.likeliest`).

        It keeps to `state.rules`, except that without `stops` it never ends early for doubt. It also ends where the
        product of the confidences so far is below the entry of `floors` for that place. `cursor` says what followed the
        same words before.
        """
        rules, sampling = state.rules, state.sampling
        self._alive, self._floors, self._alone = 1.0, floors, rules.alone
        self._gamma, self._stop_below = gamma, rules.stop_below if stops else 0.0
        self._sampling = sampling
        purpose, column = (Purpose.VERIFY, 1) if rules.alone else (Purpose.DRAFT, 0)
        at = len(state.ids) if position is None else position
        self._numbers = None if sampling.greedy else uniforms(sampling.seed, at, gamma, purpose)[:, column]
        self._cursor, self._lookup_below = cursor, rules.lookup_below
        self._said: list[tuple[int, int, bool]] = []
        self.ids: list[int] = []
        self._facts: list[Top2] = []
        self._drawn: list[Distribution] = []
        self._exits: list[int | None] = []
        self._wanted, self._known = alternatives, known
        self._others: list[tuple[Ids, Floats]] = []

    def add(self, logits: Floats, facts: Top2, exit_layer: int | None = None) -> int:
        """Add the next token, chosen from `logits` (n_vocab,), whose top two are `facts`, and return it."""
        token = facts.id
        if self._numbers is not None:
            self._drawn.append((exact_distribution if self._alone else distribution)(logits, self._sampling))
            token = draw(self._drawn[-1], float(self._numbers[len(self.ids)]))
        if self._cursor is not SILENT:
            token = self._look_up(token, facts.p1)
        self.ids.append(token)
        self._facts.append(facts)
        self._alive *= facts.p1
        self._exits.append(exit_layer)
        if self._wanted:
            self._others.append(self._alternatives(logits, token))
        return token

    def _alternatives(self, logits: Floats, token: int) -> tuple[Ids, Floats]:
        """Return candidates for the verifier's token in case it rejects `token`."""
        ids, weights = likeliest(logits, self._wanted + 1, self._known)
        others = np.flatnonzero(ids != token)[: self._wanted]
        return ids[others], weights[others]

    def _look_up(self, token: int, confidence: float) -> int:
        """Return `token`, or the context's token where the model hesitates. A token that was drawn stays."""
        said, matched, _ = self._cursor.offer()
        differs = said >= 0 and said != token and matched >= MATCHED
        copied = differs and confidence < self._lookup_below and self._numbers is None
        if copied:
            token = said
        self._said.append((said, matched, copied))
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
        if self._facts[-1].p1 < self._stop_below and not (self._said and self._said[-1][2]):
            return True
        return at <= len(self._floors) and self._alive < self._floors[at - 1]

    def build(self, importance: Floats | None, exits: bool = False) -> Chunk:
        """Return the finished chunk; `exits`: whether its drafter stops early at all."""
        n = len(self.ids)
        return Chunk(
            ids=np.array(self.ids, dtype=np.int32),
            confidence=np.fromiter((f.p1 for f in self._facts), np.float32, n),
            margin=np.fromiter((f.p1 - f.p2 for f in self._facts), np.float32, n),
            distributions=tuple(self._drawn) if self._numbers is not None else None,
            importance=NO_FLOATS if importance is None else importance[:n],
            exit_layers=tuple(self._exits) if exits else None,
            alternatives=tuple(self._others) if self._wanted else None,
            precedent=self._precedent(),
        )

    def _precedent(self) -> Precedent | None:
        if not self._said:
            return None
        said, matched, copied = zip(*self._said, strict=True)
        return Precedent(np.array(said, np.int32), np.array(matched, np.int32), np.array(copied, np.bool_))


class Meter:
    """Measures importance from the attention that a context captures, while it drafts and not before."""

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

    def rest(self) -> None:
        """Read no attention of the tokens decoded from here on (a prefill)."""
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

    @property
    def measures(self) -> bool:
        return bool(self._layers)

    def look(self) -> None:
        """Read the attention of the chunk's next token, which has been decoded."""
        if self._recorder is None or self._sums is None:
            return
        rows = [self._recorder.attention(layer) for layer in self._layers]
        if self._recorder.shared:  # the chunk's tokens lie anywhere
            now = self._recorder.visible()
            (new,) = set(np.flatnonzero(now)) - set(np.flatnonzero(self._before))
            self._cells.append(int(new))
            self._before = now
            rows = [layer[:, :, self._cells] for layer in rows]
        self._sums.add(rows)

    def importance(self) -> Floats | None:
        """Return the importance of the chunk's tokens, (gamma,), including places it turned out not to fill; None if
        not measured."""
        return None if self._sums is None else self._sums.importance(self._n)

    def by_layer(self, n: int) -> Floats | None:
        """Return the importance of the chunk's first `n` tokens in each layer, (layers, n); None if not measured."""
        return None if self._sums is None else self._sums.by_layer(n)

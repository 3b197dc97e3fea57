"""Progressive layer-wise early exit of the draft model (Synera, section 4.3).

The model is split in two (`engine.cut`). The lower shard ends in the model's own norm and head; if their margin is
above the threshold, the upper layers are skipped for this token and its row is kept. When a token needs all layers, the
kept rows go through the upper shard together with its own, in one batch. So the upper cache never lacks a token,
nothing is computed twice, and a token of full depth equals that of the unsplit model.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, Recorder, top2
from edgellm.spec.drafters.model import ModelDrafter, Step
from edgellm.spec.state import GenerationState

THRESHOLD = 0.7  # paper's margin
_PREFILL_ROWS = 32  # rows at once: llama.cpp reserves logits for each, even when it stops before the head
_HEAD_ROWS = 4  # most rows that go through the head together, which is cheaper than two batches


class EarlyExitDrafter(ModelDrafter):
    """A drafter with a model that is cut in two."""

    exits = True

    def __init__(
        self, lower: Model, upper: Model, *, n_ctx: int, threads: int | None, threshold: float = THRESHOLD,
        layers: tuple[int, ...] = (), shared: int | None = None,
    ) -> None:  # fmt: skip
        """Open contexts over the two shards of a model: `cut(..., 0, e, head=True)` and `cut(..., e + 1, last,
        head=True)`. A token leaves early where the probability of the likeliest token is more than `threshold` above
        that of the second; 1 means never. `layers`, of the lower shard, and `shared` as in `ModelDrafter`."""
        self._layer, self._threshold = lower.n_layer - 1, threshold
        capture = Capture(attention=layers, outputs=(self._layer,), stop_after=self._layer)
        below = Context(lower, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True), capture=capture)
        try:
            self._upper = Context(upper, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True))
        except BaseException:
            below.close()
            raise
        super().__init__(lower, below, layers, shared)
        self._recorder = cast("Recorder", below.captured)
        # The lower shard's output at each position; rows beyond the upper cache's length wait.
        self._rows = np.empty((n_ctx, lower.n_embd), dtype=np.float32)

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        self._upper.set_cancel(state.should_stop)

    def end(self) -> None:
        super().end()
        self._upper.set_cancel(None)

    def close(self) -> None:
        super().close()
        self._upper.close()

    def _first(self, state: GenerationState, prefix: Ids) -> Step:
        """Decode new text. All but a few ids go through every layer."""
        common, report = self._context.sync(prefix), state.prompt_progress(self._model.name)
        self._upper.rollback(min(common, self._upper.length()))
        body = max(common, len(prefix) - _HEAD_ROWS)
        for at in range(common, body, _PREFILL_ROWS):
            if body - common > _PREFILL_ROWS:
                report(at - common, body - common)
            self._run_lower(prefix[at : min(at + _PREFILL_ROWS, body)], head=False)
        if body > common:
            self._run_upper(outputs=0)
        return self._step(prefix[body:])

    def _step(self, ids: Ids) -> Step:
        row = self._run_lower(ids)[0][: self._shared]
        facts = top2(row)
        if facts.p1 - facts.p2 > self._threshold:
            return row, facts, self._layer
        row = self._run_upper(outputs=1)[0][: self._shared]
        return row, top2(row), None

    def _run_lower(self, ids: Ids, head: bool = True) -> Floats:
        """Decode `ids` in the lower shard and keep its output rows. Return the logits of the last row, (1, n_vocab),
        with `head`."""
        self._recorder.stop(not head)
        start = self._context.length()
        logits = self._context.decode(ids)
        self._rows[start : start + len(ids)] = self._recorder.output(self._layer)
        return logits

    def _run_upper(self, outputs: int) -> Floats:
        """Decode all waiting rows in the upper shard; return full logits of the last `outputs` of them."""
        waiting = self._rows[self._upper.length() : self._context.length()]
        return self._upper.decode_embeddings(waiting, outputs=outputs)

    def _clear(self) -> None:
        self._context.clear()
        self._upper.clear()

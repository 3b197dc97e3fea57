"""Progressive layer-wise early exit of the draft model (Synera, section 4.3).

The model is split in two (`engine.cut`). The lower shard ends in the model's own norm and head; if their margin is
above the threshold, the upper layers are skipped for this token and its row is kept. When a token needs all layers, the
kept rows go through the upper shard together with its own, in one batch. So the upper cache never lacks a token,
nothing is computed twice, and a token of full depth equals that of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, Recorder, top2
from edgellm.errors import InvalidOption
from edgellm.spec.drafters.model import ChunkBuilder, meter_of, within
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk

THRESHOLD = 0.7  # paper's margin
_PREFILL_ROWS = 32  # rows at once: llama.cpp reserves logits for each, even when it stops before the head
_HEAD_ROWS = 4  # most rows that go through the head together, which is cheaper than two batches


class EarlyExitDrafter(Drafter):
    """A drafter with a model that is cut in two. Both contexts are the drafter's own, and closed with it."""

    def __init__(
        self,
        lower: Context,
        upper: Context,
        *,
        threshold: float = THRESHOLD,
        layers: tuple[int, ...] = (),
        shared: int | None = None,
    ) -> None:
        """Take over the contexts, which `open` makes, and drop their caches.

        `lower` is over the shard that begins at layer 0, with a head, and captures its last layer with a stop there;
        `upper` is over the other layers. `threshold`: a token leaves early where the probability of the likeliest token
        is more than this above that of the second; 1 means never. `layers`: as in `ModelDrafter`, of the lower shard;
        `shared` as there.

        Raises:
            InvalidOption: a threshold outside [0, 1], contexts that do not fit together, or layers not captured.
        """
        if not 0.0 <= threshold <= 1.0:
            raise InvalidOption(f"The exit threshold {threshold} is not in [0, 1].", "Give one such as 0.7.")
        below, above = lower.model, upper.model
        if (below.n_embd, below.n_vocab, lower.n_ctx) != (above.n_embd, above.n_vocab, upper.n_ctx):
            raise InvalidOption(
                f"The shards do not fit together: rows of {below.n_embd} and {above.n_embd} numbers, {below.n_vocab}"
                f" and {above.n_vocab} tokens, {lower.n_ctx} and {upper.n_ctx} positions.",
                "Cut both from one model, each with a head, and give their contexts one length.",
            )
        self._layer = below.n_layer - 1
        recorder = lower.captured
        if recorder is None or (recorder.capture.stop_after, recorder.capture.outputs) != (self._layer, (self._layer,)):
            raise InvalidOption(
                "The lower context does not capture the output of its last layer.", "Use EarlyExitDrafter.open."
            )
        self._recorder: Recorder = recorder
        self._lower, self._upper, self._threshold, self._shared = lower, upper, threshold, shared
        self._meter = meter_of(lower, layers)
        # The lower shard's output at each position; rows beyond the upper cache's length wait.
        self._rows = np.empty((lower.n_ctx, below.n_embd), dtype=np.float32)
        self._clear()

    @classmethod
    def open(
        cls,
        lower: Model,
        upper: Model,
        *,
        n_ctx: int,
        threads: int | None = None,
        threshold: float = THRESHOLD,
        layers: tuple[int, ...] = (),
        shared: int | None = None,
    ) -> Self:
        """Open a drafter over the two shards of a model: `cut(..., 0, e, head=True)` and `cut(..., e + 1, last,
        head=True)`.

        Raises:
            InvalidOption: as for the class; or a layer that the lower shard does not have.
            EngineFailed: there is no memory for the caches.
        """
        last = lower.n_layer - 1
        capture = Capture(attention=layers, outputs=(last,), stop_after=last)
        below = Context(lower, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True), capture=capture)
        try:
            above = Context(upper, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True))
            return cls(below, above, threshold=threshold, layers=layers, shared=shared)
        except BaseException:
            below.close()
            raise

    def begin(self, state: GenerationState) -> None:
        for context in (self._lower, self._upper):
            context.set_cancel(state.should_stop)

    def end(self) -> None:
        for context in (self._lower, self._upper):
            context.set_cancel(None)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk. Its last token is decoded in no layer before a later text holds it."""
        prefix, meter = within(state.ids, self._shared), self._meter
        chunk = ChunkBuilder(state, gamma, cursor=state.lookup(prefix))
        try:
            common = self._lower.sync(prefix)
            self._upper.rollback(min(common, self._upper.length()))
            if meter is not None:
                meter.pause()
            logits = self._prefill(prefix[common:], state.prompt_progress(self._lower.model.name))
            if meter is not None:
                meter.start(len(prefix), gamma)
            while True:
                logits = logits[: self._shared]
                facts, layer = top2(logits), self._layer
                exits = facts.p1 - facts.p2 > self._threshold
                if not exits:
                    logits = self._run_upper(outputs=1)[0][: self._shared]
                    facts = top2(logits)
                token = chunk.add(logits, facts, layer if exits else None)
                if chunk.full() or self._lower.model.is_eog(token):
                    break
                logits = self._run_lower(np.array([token], dtype=np.int32))[0]
                if meter is not None:
                    meter.record()
        except BaseException:  # An interrupted decode leaves invalid caches.
            self._clear()
            raise
        return chunk.build(None if meter is None else meter.importance(len(chunk.ids)), exits=True)

    def close(self) -> None:
        self._lower.close()
        self._upper.close()

    def _prefill(self, ids: Ids, progress: Callable[[int, int], None]) -> Floats:
        """Decode new text; return the exit head's logits for its last id. All but a few ids go through every layer.
        Call `progress` as decodes do."""
        body = max(0, len(ids) - _HEAD_ROWS)
        for at in range(0, body, _PREFILL_ROWS):
            if body > _PREFILL_ROWS:
                progress(at, body)
            self._run_lower(ids[at : min(at + _PREFILL_ROWS, body)], head=False)
        if body:
            self._run_upper(outputs=0)
        logits: Floats = self._run_lower(ids[body:])[0]
        return logits

    def _run_lower(self, ids: Ids, head: bool = True) -> Floats:
        """Decode `ids` in the lower shard and keep its output rows. Return the logits of the last row, (1, n_vocab),
        with `head`."""
        self._recorder.stop(not head)
        start = self._lower.length()
        logits = self._lower.decode(ids)
        self._rows[start : start + len(ids)] = self._recorder.output(self._layer)
        return logits

    def _run_upper(self, outputs: int) -> Floats:
        """Decode all waiting rows in the upper shard; return full logits of the last `outputs` of them."""
        waiting = self._rows[self._upper.length() : self._lower.length()]
        return self._upper.decode_embeddings(waiting, outputs=outputs)

    def _clear(self) -> None:
        self._lower.clear()
        self._upper.clear()

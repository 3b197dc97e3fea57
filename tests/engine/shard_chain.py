"""Shards of a model one behind the other, and how far their logits are from those of the whole model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, check_cuttable, check_gguf, cut

SPANS = ((50, 50), (1, 1), (1, 1), (7, 3), (1, 1))
"""Ids and rows of logits of each decode: a prompt longer than the window, single tokens, a verification."""
CHANGED = 40  # positions that are kept before other ids follow


class ShardChain:
    """The parts of a model that begin at `starts`, with the face of a context. Shards are cut into `folder` once."""

    def __init__(self, whole: Path, folder: Path, starts: Sequence[int], n_ctx: int = 128) -> None:
        self._closing = ExitStack()
        n_layer = check_cuttable(check_gguf(whole))
        self._contexts = []
        for first, end in pairwise([*starts, n_layer]):
            path = folder / f"{first}-{end - 1}.gguf"
            if not path.exists():
                cut(whole, path, first, end - 1, head=end == n_layer)
            model = self._closing.enter_context(Model.load(path, faults=()))
            assert model.n_layer == end - first
            last = model.n_layer - 1
            capture = Capture(outputs=(last,), stop_after=last) if end < n_layer else None
            opened = Context(model, ContextSpec(n_ctx=n_ctx, threads=1, whole_window=True), capture=capture)
            self._contexts.append(self._closing.enter_context(opened))

    def decode(self, ids: Ids, outputs: int = 1) -> Floats:
        logits = self._contexts[0].decode(ids, outputs=outputs)
        for before, context in pairwise(self._contexts):
            assert before.captured is not None
            rows = before.captured.output(before.model.n_layer - 1)
            assert rows.shape == (len(ids), context.model.n_embd)
            logits = context.decode_embeddings(rows, outputs=outputs)
        return logits

    def rollback(self, length: int) -> None:
        for context in self._contexts:
            context.rollback(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._closing.close()


class WholeModel:
    """What a model computes uncut, to compare all ways to cut it with."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, check_gguf(path)
        with Model.load(path, faults=()) as model, Context(model, ContextSpec(n_ctx=128, threads=1)) as context:
            self.ids = np.random.default_rng(0).integers(0, model.n_vocab, 100).astype(np.int32)
            self.logits = list(self._decoded(context))

    def largest_difference(self, folder: Path, starts: Sequence[int]) -> float:
        """Return the largest difference of a logit to that of the parts beginning at `starts`, as a share of the
        largest logit."""
        with ShardChain(self.path, folder, starts) as chain:
            found = zip(self._decoded(chain), self.logits, strict=True)
            return max(float(np.abs(logits - whole).max() / np.abs(whole).max()) for logits, whole in found)

    def _decoded(self, chain: Context | ShardChain) -> Iterator[Floats]:
        at = 0
        for n, outputs in SPANS:
            yield chain.decode(self.ids[at : at + n], outputs=outputs).copy()
            at += n
        chain.rollback(CHANGED)
        for n in (1, 5, 1):
            yield chain.decode(self.ids[::-1][:n].copy()).copy()

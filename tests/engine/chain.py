"""Shards of a model one behind the other, with the face of a context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Self

from edgellm.engine import Capture, Context, Floats, Ids, Model, check_cuttable, check_gguf, cut


class Chain:
    """The parts of a model that begin at `starts`."""

    def __init__(self, whole: Path, folder: Path, starts: Sequence[int], n_ctx: int = 128) -> None:
        self._closing = ExitStack()
        n_layer = check_cuttable(check_gguf(whole))
        self._contexts = []
        for first, end in pairwise([*starts, n_layer]):
            path = folder / f"{first}-{end - 1}.gguf"
            if not path.exists():
                cut(whole, path, first, end - 1, head=end == n_layer)
            model = self._closing.enter_context(Model.load(path))
            assert model.n_layer == end - first
            last = model.n_layer - 1
            capture = Capture(outputs=(last,), stop_after=last) if end < n_layer else None
            opened = Context(model, n_ctx=n_ctx, threads=1, capture=capture, whole_window=True)
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

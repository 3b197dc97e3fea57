"""A small model as the drafter."""

from __future__ import annotations

import numpy as np

from edgellm.engine import Context, Model, top2
from edgellm.spec.records import Chunk, Distribution, Floats, Ids, Sampling
from edgellm.spec.sampling import Purpose, distribution, draw, uniforms


class ModelDrafter:
    """Drafts with a model of its own. The context is the drafter's alone, and is closed with it."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model = model
        self._context = context

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        """See `Drafter.draft`. The last token of a chunk is not decoded before a later prefix holds it."""
        ids: list[int] = []
        first: list[float] = []
        margin: list[float] = []
        drawn: list[Distribution] = []
        numbers = None if sampling.greedy else uniforms(sampling.seed, len(prefix), gamma, Purpose.DRAFT)[:, 0]
        try:
            logits = self._context.decode(prefix[self._context.sync(prefix) :])[0]
            while True:
                facts = top2(logits)
                token = facts.id
                if numbers is not None:
                    drawn.append(distribution(logits, sampling))
                    token = draw(drawn[-1], float(numbers[len(ids)]))
                ids.append(token)
                first.append(facts.p1)
                margin.append(facts.p1 - facts.p2)
                if len(ids) == gamma or self._model.is_eog(token):
                    break
                logits = self._context.decode(np.array([token], dtype=np.int32))[0]
        except BaseException:  # an interrupted decode leaves a cache that cannot be trusted
            self._context.clear()
            raise
        return Chunk(
            ids=np.array(ids, dtype=np.int32),
            confidence=_floats(first),
            margin=_floats(margin),
            distributions=tuple(drawn) if numbers is not None else None,
        )

    def close(self) -> None:
        self._context.close()


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float32)

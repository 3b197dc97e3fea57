"""The layer whose attention is importance: the one that tells rejected chunks from accepted ones (Synera, 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.engine import Ids, Model
from edgellm.llm.drafter_pool import DrafterKind, Drafters
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.logistic import auc
from edgellm.spec.gates.profiler import Watcher
from edgellm.spec.params import CHUNK
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Floats

PROMPTS = 80
"""The most prompts that are read to find the layer: with some four hundred chunks an AUC is known to about 0.03."""


def sample(prompts: Sequence[Ids]) -> Sequence[Ids]:
    """Return at most `PROMPTS` of the prompts, spread evenly: they may be sorted by topic. At least one is given."""
    return prompts[:: -(-len(prompts) // PROMPTS)]


def telling_layer(
    draft: Model,
    drafters: Drafters,
    session: VerifierSession,
    prompts: Sequence[Ids],
    most: int,
    context: int,
    reached: Callable[[int], None],
) -> tuple[int, tuple[float, ...]]:
    """Return the layer with the best AUC, counted from 0, and the AUC of each, on replies to `prompts` of up to `most`
    tokens.

    Everything is verified, in the paper's chunks of four: in smaller ones no token gets attention from many. Shorter
    chunks at the end of a reply do not count: their length itself would seem to predict the verdict. If no chunk was
    rejected, or every one, each AUC is NaN and the layer is the first. `reached` is called with the prompts done.
    """
    kind = DrafterKind(tuple(range(draft.n_layer)))
    drafter = drafters.take(kind)
    if not isinstance(drafter, ModelDrafter):
        raise TypeError("a drafter without an early exit was asked for")
    noting = _Noting(drafter)
    watcher = Watcher(noting, session, draft.is_eog, GenerationLimits(most, context, CHUNK))
    rejected: list[bool] = []
    try:
        for done, prompt in enumerate(prompts):
            reached(done)
            rejected += [not chunk.whole for chunk in watcher.verified(prompt) if chunk.tokens == CHUNK]
    finally:
        drafters.give(kind, drafter)
    columns = np.array(noting.layers, dtype=np.float64).reshape(-1, draft.n_layer).T
    found = [auc(layer, np.array(rejected, dtype=np.bool_)) for layer in columns]
    return int(np.nan_to_num(np.array(found), nan=0.0).argmax()), tuple(found)


class _Noting(Drafter):
    """A drafter whose full chunks' importance is noted, layer by layer."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._drafter = drafter
        self.layers: list[Floats] = []

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        chunk = self._drafter.propose(state, gamma)
        layers = self._drafter.importance_by_layer(len(chunk))
        if layers is not None and len(chunk) == CHUNK:
            self.layers.append(layers.mean(axis=1))
        return chunk

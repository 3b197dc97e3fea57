"""Drafters outside the loop: begun for a prompt, and told of verdicts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.ngram.retriever import DraftIndex
from edgellm.spec.params import SOURCES
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Round, Verdict


def taken(
    memory: DraftIndex, prompt: Ids | list[int], names: Collection[str] = SOURCES, model: Drafter | None = None
) -> HybridDrafter:
    """Return a drafter from the memory's sources of these names and from `model`, for a reply to `prompt`."""
    copies = memory.take(names)
    assert copies is not None
    drafter = HybridDrafter(memory.policy, copies, model, 3, linked=True)
    drafter.begin(GenerationState(np.asarray(prompt, dtype=np.int32)))
    return drafter


def told(drafter: Drafter, chunk: Chunk, verdict: Verdict, seconds: float = 1.0) -> None:
    """The verdict on the last chunk is there, after so long."""
    drafter.observe(GenerationState(), Round(0, chunk, Decision(True, ""), verdict, 0.0, 0.0, seconds))

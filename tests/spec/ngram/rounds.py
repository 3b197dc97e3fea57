"""Drafters outside the loop: begun for a prompt, and told of verdicts."""

from __future__ import annotations

import numpy as np

from edgellm.spec.ngram.draft_index import DraftIndex
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Ids, Round, Verdict


def taken(memory: DraftIndex, prompt: Ids | list[int]) -> RetrievalDrafter:
    """The memory's drafter, for a reply to `prompt`."""
    drafter = memory.take()
    assert drafter is not None
    drafter.begin(GenerationState(np.asarray(prompt, dtype=np.int32)))
    return drafter


def told(drafter: Drafter, chunk: Chunk, verdict: Verdict, seconds: float = 1.0) -> None:
    """The verdict on the last chunk is there, after so long."""
    drafter.observe(GenerationState(), Round(0, chunk, Decision(True, ""), verdict, 0.0, 0.0, seconds))

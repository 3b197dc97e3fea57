"""What is learned of drafts that were never made."""

from __future__ import annotations

import numpy as np

from edgellm.spec.draft_length import CostCurve
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Verdict
from tests.spec.ngram.rounds import taken, told
from tests.spec.ngram.test_drafter import memory


def test_what_is_offered_and_not_drafted_is_learned_of_too() -> None:
    """A second row costs nearly as much as a first, so at first nothing pays; what would have been right shows."""
    known = memory("context", curve=CostCurve((1, 2, 64), (1.0, 1.9, 58.0)))
    text = np.array([1, 2, 3, 4, 5] * 2, dtype=np.int32)
    drafter = taken(known, text)
    lengths = []
    for _ in range(40):
        chunk = drafter.propose(GenerationState(text), 1)
        right = 1 + (int(text[-1]) + np.arange(len(chunk) + 1)) % 5
        verdict = Verdict(len(chunk), right[-1:].astype(np.int32))
        told(drafter, chunk, verdict, 1.0 + 0.9 * len(chunk))
        text = np.append(text, right).astype(np.int32)
        lengths.append(len(chunk))
    assert lengths[0] == 0
    assert sum(lengths[20:]) >= 15
    known.give()

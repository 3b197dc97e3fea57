"""Looking for something to copy takes time, too: it is left out while it does not pay, and taken up when it does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.spec.draft_length import CostCurve
from edgellm.spec.ngram.draft_index import DraftIndex
from edgellm.spec.ngram.drafter import FREE_LOOKUPS, MIN_LOOKUPS, SHARE, LookupThrottle
from edgellm.spec.params import SOURCES
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids, Verdict
from tests.spec.ngram.rounds import taken, told

LOOK = 1e-4  # seconds
NOWHERE = list(range(1000, 3000))
CURVE = CostCurve((1, 64), (LOOK / 1e3, LOOK / 5e2))  # a model so small that any look is dear


def looked(looks: LookupThrottle, rounds: int, seconds: float, brought: Callable[[int], float]) -> list[int]:
    """In which of so many rounds of `seconds` each there was a look; it brings what is said."""
    found = []
    for number in range(rounds):
        looks.record_round(seconds)
        if looks.due:
            found.append(number)
            looks.record_lookup(LOOK, brought(number))
    return found


def test_what_brings_nothing_takes_little_of_the_time() -> None:
    looks = LookupThrottle()
    assert looked(looks, MIN_LOOKUPS, 1e-3, lambda _: 0.0) == list(range(MIN_LOOKUPS))  # before it is judged
    some = looked(looks, 2000, 1e-3, lambda _: 0.0)
    assert 0.8 <= len(some) * LOOK / (2000 * 1e-3 * SHARE) <= 1.2
    assert looked(looks, 100, 0.1, lambda _: 0.0) == list(range(100)), "a slow verifier has the time"


def test_what_pays_again_is_looked_for_every_time_again() -> None:
    looks = LookupThrottle()
    looked(looks, 500, 1e-3, lambda _: 0.0)
    some = looked(looks, 200, 1e-3, lambda _: 3e-3)
    assert some[0] <= LOOK / (1e-3 * SHARE)
    assert some[1:] == list(range(some[1], 200))


def test_every_reply_begins_with_some_looks() -> None:
    looks = LookupThrottle()
    looked(looks, 500, 1e-3, lambda _: 0.0)
    looks.begin()
    assert looked(looks, FREE_LOOKUPS, 0.0, lambda _: 0.0) == list(range(FREE_LOOKUPS))
    assert looked(looks, 50, 0.0, lambda _: 0.0) == []


def write(drafter: Drafter, prompt: list[int], reply: list[int], seconds: float) -> list[Chunk]:
    """What is drafted while a verifier writes `reply`, in so many seconds a round."""
    text: Ids = np.array(prompt + reply, dtype=np.int32)
    at, chunks = len(prompt), []
    while at < len(text):
        chunk = drafter.propose(GenerationState(text[:at], explain=True), 8)
        same = chunk.ids[: len(text) - at - 1] == text[at : at + len(chunk)][: len(text) - at - 1]
        accepted = int(np.cumprod(same).sum())
        told(drafter, chunk, Verdict(accepted, text[at + accepted :][:1]), seconds)
        at += accepted + 1
        chunks.append(chunk)
    return chunks


def test_a_drafter_rests_where_nothing_can_be_copied_and_copies_when_it_can_again() -> None:
    memory = DraftIndex(SOURCES, CURVE, lambda _: False, lambda _: False)

    prompt = list(range(50))
    chunks = write(taken(memory, prompt), prompt, NOWHERE[:400], 1e-5)
    memory.give()
    resting = [chunk for chunk in chunks if "now and then" in chunk.reason]
    assert len(resting) > 200
    chunks = write(taken(memory, prompt), prompt, prompt[10:] * 3, 1.0)  # rounds of a second: there is time to look
    memory.give()
    assert sum(len(chunk) for chunk in chunks) > 50

"""The first verdict, where the verifier has begun with the prompt: the device drafts ahead meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from edgellm.errors import VerifierLost
from edgellm.spec.guarded_session import LOST, GuardedSession
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids, Verdict
from tests.spec.fakes import FakeDrafter, FakePending, FakeSession, FakeVerifier
from tests.spec.running import BIG, PROMPT, SMALL

READS = 3


@dataclass
class Reading(FakePending):
    """There once it has been asked for often enough."""

    looks: int = READS

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class ReadingSession(FakeSession):
    """A session whose every verdict takes a while."""

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Reading:
        found = super().submit(prefix, chunk, extra)
        return Reading(found.session, found.prefix, found.chunk, found.extra)


class ReadingVerifier(FakeVerifier):
    def open(self, state: GenerationState) -> ReadingSession:
        self.sessions.append(ReadingSession(self, state.sampling))
        return self.sessions[-1]  # type: ignore[return-value]


@dataclass
class Ahead(FakeDrafter):
    """Notes how many verdicts have been asked for whenever it looks whether this one is there, and is not to be
    interrupted by an error: its branches would be lost."""

    seen: list[int] = field(default_factory=list)
    asked: Callable[[], int] = lambda: 0

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        try:
            while not until():
                self.seen.append(self.asked())
        except VerifierLost:
            pytest.fail("the loss is for the verdict to tell")


def first_verdict(lost: list[int]) -> tuple[GuardedSession, Ahead, Callable[[], Verdict | None]]:
    verifier, state = ReadingVerifier(BIG, lost=lost), GenerationState(PROMPT)
    session = GuardedSession(verifier, state, alone=False, announce=True)
    drafter = Ahead(SMALL, asked=lambda: verifier.sessions[0].asked)
    chunk = drafter.propose(state, 4)
    return session, drafter, lambda: session.verify(state, chunk, drafter)


def test_the_device_drafts_ahead_from_the_prompt_on_and_the_draft_is_sent_once_that_is_read() -> None:
    _, drafter, verify = first_verdict([])
    verdict = verify()
    assert drafter.seen == [1] * READS + [2] * READS
    assert verdict is not None
    assert (verdict.bytes_up, verdict.bytes_down) == (20, 40), "both requests count"


@pytest.mark.parametrize("lost", [[0], [1]])
def test_a_verifier_lost_at_either_request_is_noticed_after_drafting_ahead(lost: list[int]) -> None:
    session, drafter, verify = first_verdict(lost)
    assert verify() is None
    assert len(drafter.seen) >= READS
    assert LOST in list(session.notices())

"""The first verdict, where the verifier has begun with the prompt: the device drafts ahead meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from edgellm.errors import VerifierLost
from edgellm.spec.loop import open_verification
from edgellm.spec.lost_verifier import LOST
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Verdict
from edgellm.spec.verifier import Verification, VerifyRequest
from tests.spec.fakes import FakeDrafter, FakeReply, FakeVerifier
from tests.spec.running import BIG, PROMPT, SMALL

READS = 3


class Reading(Future[Verdict]):
    """There once it has been looked for often enough."""

    def __init__(self, settle: Callable[[Future[Verdict]], None]) -> None:
        super().__init__()
        self._looks, self._settle = READS, settle

    def look(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            self._settle(self)


class ReadingReply(FakeReply):
    """A reply whose every verdict takes a while."""

    last: Reading

    def pending(self, request: VerifyRequest) -> Future[Verdict]:
        self.last = Reading(lambda found: self.settle(found, request))
        return self.last


class ReadingVerifier(FakeVerifier):
    def reply(self) -> FakeReply:
        return ReadingReply(self)


@dataclass
class Ahead(FakeDrafter):
    """Notes how many verdicts have been asked for whenever it looks whether this one is there, and is not to be
    interrupted by an error: its branches would be lost."""

    seen: list[int] = field(default_factory=list)
    asked: Callable[[], int] = lambda: 0
    look: Callable[[], None] = lambda: None

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        try:
            while not until():
                self.seen.append(self.asked())
                self.look()
        except VerifierLost:
            pytest.fail("the loss is for the verdict to tell")


def first_verdict(lost: list[int]) -> tuple[Verification, Ahead, Callable[[], Verdict | None]]:
    verifier, state = ReadingVerifier(BIG, lost=lost), GenerationState(PROMPT)
    verification = open_verification(verifier, state, alone=False, announce=True)
    (reply,) = verifier.sessions
    assert isinstance(reply, ReadingReply)
    drafter = Ahead(SMALL, asked=lambda: reply.asked, look=lambda: reply.last.look())
    chunk = drafter.propose(state, 4)
    return verification, drafter, lambda: verification.verify(chunk, drafter)


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

"""What a device does when the verifier is slow, hangs, refuses, talks nonsense or goes."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
import numpy as np
import pytest

from edgellm.engine import Vocabulary
from edgellm.errors import VerifierLost, VerifierSlow, VerifierUnavailable
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.link import Timing
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import Chunk, Ids, PromptProgress, Verdict
from edgellm.spec.verification import RetryDelay
from tests.services.scripted import Script, scripted, until_cancelled, verdict, working
from tests.waiting import until

Rounds = Iterator[pb.Verify]
Frames = Iterable[pb.VerifierFrame | bytes]

# What a busy machine delays is not lost: only the tests of silence wait no longer than this for it.
PATIENT = Timing(least=600.0, stall=600.0, silent_beats=2400, retry=0.05, retry_most=0.2)
QUIET = replace(PATIENT, beat=0.05, silent_beats=4)
TEXT = np.arange(10, dtype=np.int32)


def each(answer: Callable[[pb.Verify], pb.VerifierFrame | bytes]) -> Script:
    """A verifier that answers every request like that."""
    return lambda rounds, _context: (answer(ask) for ask in rounds)


def silent(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
    """A verifier that takes a request, and says nothing."""
    next(rounds)
    until_cancelled(context)
    return iter(())


def five(ask: pb.Verify) -> pb.VerifierFrame:
    return verdict(ask.round, 5)


@contextmanager
def asking(
    vocabulary: Vocabulary, script: Script, timing: Timing = PATIENT, hello: dict[str, Any] | None = None
) -> Iterator[Session]:
    with scripted(vocabulary, script, hello) as address:
        verifier = RemoteVerifier(address, vocabulary, timing=timing)
        try:
            yield verifier.open(GenerationState())
        finally:
            verifier.close()


def lost(session: Session, prefix: Ids = TEXT, chunk: Chunk | None = None) -> str:
    """Why no verdict comes."""
    with pytest.raises(VerifierUnavailable) as caught:
        session.submit(prefix, chunk or Chunk()).result()
    return caught.value.what


def stands_still(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
    ask = next(rounds)
    while context.is_active():
        yield working(ask.round, 7)
        time.sleep(0.05)


def ends_early(rounds: Rounds, _context: grpc.ServicerContext) -> Frames:
    next(rounds)
    return iter(())


@pytest.mark.parametrize(
    ("script", "timing", "says"),
    [(silent, QUIET, "stopped responding"), (stands_still, replace(PATIENT, stall=0.5), "made no progress"),
     (ends_early, PATIENT, "ended the session")],
)  # fmt: skip
def test_who_gives_no_verdict_is_lost(vocabulary: Vocabulary, script: Script, timing: Timing, says: str) -> None:
    with asking(vocabulary, script, timing) as session:
        assert says in lost(session)
        if script is silent:
            until(session.ready)


def test_a_device_that_is_late_itself_does_not_blame_the_verifier(vocabulary: Vocabulary) -> None:
    """Its network's loop gets the processor four beats too late every time, as where it sleeps with its machine."""
    settled: list[bool] = []

    async def hog(pending: Future[Verdict]) -> None:
        for _ in range(2 * QUIET.silent_beats):
            time.sleep(4 * QUIET.beat)
            await asyncio.sleep(0)
        settled.append(pending.done())

    with asking(vocabulary, silent, replace(QUIET, stall=6 * QUIET.silent_beats * QUIET.beat)) as session:
        pending = session.submit(TEXT, Chunk())
        run_in_network_loop(hog(pending)).result(120)
        assert settled == [False]
        with pytest.raises(VerifierLost, match="stopped responding"):
            pending.result()


def test_a_verifier_that_is_slow_but_works_is_waited_for(vocabulary: Vocabulary) -> None:
    def script(rounds: Rounds, _context: grpc.ServicerContext) -> Frames:
        for ask in rounds:
            for step in range(30):  # 3 s: longer than the silence that would be too long
                time.sleep(0.1)
                yield working(ask.round, step)
            yield verdict(ask.round, 42)

    with asking(vocabulary, script, replace(PATIENT, beat=0.5, silent_beats=4, stall=2.0)) as session:
        got = session.submit(TEXT, Chunk()).result()
        assert got.tokens.tolist() == [42]
        assert got.bytes_down > 20 * 4


def test_a_device_reports_how_far_a_verifier_has_read(vocabulary: Vocabulary) -> None:
    reports: list[PromptProgress] = []
    text = np.resize(TEXT, 900).astype(np.int32)
    read = threading.Event()

    def on_progress(report: PromptProgress) -> None:
        reports.append(report)
        if report.done == 600:
            read.set()

    def script(rounds: Rounds, _context: grpc.ServicerContext) -> Frames:
        ask = next(rounds)
        yield pb.VerifierFrame(working=pb.Working(round=ask.round, step=1, computed=600, cached=100))
        assert read.wait(60.0)
        yield verdict(ask.round, 42)

    with (
        scripted(vocabulary, script, {"context_length": 1024}) as address,
        closing(RemoteVerifier(address, vocabulary)) as verifier,
        closing(verifier.open(GenerationState(on_progress=on_progress))) as session,
    ):
        assert session.wait(session.submit(text, Chunk())).tokens.tolist() == [42]
    assert {(report.model, report.total) for report in reports} == {("scripted", 900)}
    assert {(report.cached, report.done) for report in reports} <= {(0, 0), (100, 600)}


@pytest.mark.parametrize("fast", [True, False])
def test_a_verifier_that_works_for_ever_is_waited_for_no_longer_than_its_work_takes(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """Whether it was fast before, or never answered."""
    monkeypatch.setattr("edgellm.spec.verification.VerdictDeadline.first_seconds", 600.0 if fast else 0.2)
    monkeypatch.setattr("edgellm.spec.verification.VerdictDeadline.unknown_pass", 0.01)

    def script(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
        for ask in rounds:
            if fast and len(ask.prefix) == len(TEXT):
                yield verdict(ask.round, 5)
                continue
            for step in count():
                if not context.is_active():
                    return
                yield working(ask.round, step)
                time.sleep(0.02)

    with asking(vocabulary, script, replace(PATIENT, beat=0.05, least=0.3, retry=0.5)) as session:
        if fast:
            assert session.submit(TEXT, Chunk()).result().tokens.tolist() == [5]
        with pytest.raises(VerifierSlow, match="has not answered within"):
            session.submit(np.append(TEXT, 5).astype(np.int32), Chunk()).result()
        until(session.ready)  # over the same connection


def padded(size: int) -> bytes:
    """A frame with so many bytes in a field that it does not have: what is not known would be kept, and take memory."""
    length = bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21))
    return working(1).SerializeToString() + b"\x82\x01" + length + bytes(size)  # in field 16


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff", b"", verdict(99, 1), verdict(1, 2**20), verdict(1, 1, accepted=3), verdict(1),
        pb.VerifierFrame(verdict=pb.Verdict(round=1, tokens=[1], passes=2**32 - 1)),
        working(99),
        padded(2 * 2**20), padded(14 * 2**20),
    ],
    ids=lambda frame: str(frame)[:40],
)  # fmt: skip
def test_nonsense_is_a_lost_verifier_and_not_a_crash(vocabulary: Vocabulary, frame: pb.VerifierFrame | bytes) -> None:
    with asking(vocabulary, each(lambda ask: frame if ask.round == 1 else five(ask))) as session:
        large = isinstance(frame, bytes) and len(frame) > 2**20
        assert ("larger than max" if large else "violates the protocol") in lost(session)
        until(session.ready)
        assert session.submit(TEXT, Chunk()).result().tokens.tolist() == [5]


def test_the_time_that_a_verdict_took_is_no_longer_than_it_was_waited_for(vocabulary: Vocabulary) -> None:
    late = each(lambda ask: pb.VerifierFrame(verdict=pb.Verdict(round=ask.round, tokens=[5], passes=1, seconds=1e9)))
    with asking(vocabulary, late) as session:
        assert session.submit(TEXT, Chunk()).result().seconds < 1e6


def test_a_frame_that_nobody_asked_for_ends_the_session(vocabulary: Vocabulary) -> None:
    def script(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
        for ask in rounds:
            yield verdict(ask.round, 5)
            yield verdict(ask.round, 5)

    with asking(vocabulary, script) as session:
        assert session.submit(TEXT, Chunk()).result().tokens.tolist() == [5]
        until(lambda: not session.ready())
        until(session.ready)


@pytest.mark.parametrize("code", [grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INTERNAL])
def test_a_refusal_says_why_and_the_waits_between_tries_grow_until_a_verdict_comes(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
) -> None:
    waits, chosen = list[float](), RetryDelay.next

    def noted(delay: RetryDelay) -> float:
        waits.append(chosen(delay))
        return waits[-1]

    def script(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
        for ask in rounds:
            if ask.round != 4:
                context.abort(code, "because of this")
            yield five(ask)

    monkeypatch.setattr(RetryDelay, "next", noted)
    with asking(vocabulary, script, replace(PATIENT, retry=0.1, retry_most=10.0)) as session:
        for _ in range(3):
            assert "because of this" in lost(session)
            assert not session.ready()
            until(session.ready)
        assert waits[2] > waits[0]  # 0.2 to 0.4 against 0.05 to 0.1
        session.submit(TEXT, Chunk()).result()
        lost(session)
        assert waits[3] < waits[2]


def test_a_verifier_that_shuts_down_is_not_asked_any_more(vocabulary: Vocabulary) -> None:
    def script(rounds: Rounds, _context: grpc.ServicerContext) -> Frames:
        yield verdict(next(rounds).round, 5)
        yield pb.VerifierFrame(draining=pb.Draining())

    with asking(vocabulary, script, replace(PATIENT, retry=30.0, retry_most=30.0)) as session:
        assert session.submit(TEXT, Chunk()).result().tokens.tolist() == [5]
        until(lambda: not session.ready())
        lost(session)
        assert "not reachable" in lost(session)


def test_another_model_does_not_go_on_with_a_reply(vocabulary: Vocabulary) -> None:
    """A verifier is served at the same address after a restart, with another vocabulary at first."""
    hello = {"model_hash": bytes(32)}

    def script(rounds: Rounds, context: grpc.ServicerContext) -> Frames:
        yield verdict(next(rounds).round, 5)
        next(rounds)
        hello.update(model_hash=b"another".ljust(32), vocabulary=b"another")
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with asking(vocabulary, script, hello=hello) as session:
        assert session.submit(TEXT, Chunk()).result().tokens.tolist() == [5]
        lost(session)
        time.sleep(0.5)  # time for several tries
        assert not session.ready()
        del hello["vocabulary"]
        until(session.ready)
        assert "another model" in lost(session)

"""A full verifier says when to come again; a device that does not read is dropped; neither holds the others up."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.errors import VerifierBusy
from edgellm.rpc import channel
from edgellm.rpc.channel import MAX_BUSY_MS, SESSION
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.services.verification_codec import write_open
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Ids
from edgellm.spec.verification import judge
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone, wait_for
from tests.services.test_verification_service import Device, verify
from tests.waiting import until


class Deaf:
    """A device that asks and asks, and never reads an answer."""

    def __init__(self, channel: grpc.Channel, opening: bytes) -> None:
        self._stop = False
        self.sent = 0
        self._opening = opening
        self.call = channel.stream_stream(SESSION, bytes, bytes)(self._frames())

    def _frames(self) -> Iterator[bytes]:
        yield self._opening
        for number in itertools.count(1):
            if self._stop:
                return
            self.sent = number
            position = 0 if number == 1 else 4
            yield verify(round=number, position=position, prefix=(5,) * (5 - position), extra=100).SerializeToString()

    def stop(self) -> None:
        self._stop = True
        self.call.cancel()


class Held:
    """Judgements that wait until they are let go: whoever has asked is not answered before that."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        patch.setattr("edgellm.spec.verification.judge", self._judge)

    def _judge(self, *arguments: Any) -> Any:
        self.asked.set()
        assert self.go.wait(60)
        return judge(*arguments)


def test_a_device_that_does_not_read_is_dropped_and_nobody_else_notices(
    exact: Model, events: list[str], prompt: Ids, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.services.server.listener.READ_TIMEOUT_SECONDS", 0.3)
    narrow = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]  # takes 64 bytes without being read
    with (
        VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1, on_event=events.append) as server,
        grpc.insecure_channel(str(server.address), options=narrow) as channel,
    ):
        deaf = Deaf(channel, write_open(GREEDY, exact.vocabulary.fingerprint).SerializeToString())
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        session = remote.open(GenerationState())
        assert session.submit(prompt, Chunk(), extra=3).result().tokens.tolist() == alone(prompt, 4)
        wait_for("has not read its stream for 0.3 seconds", events)
        done = server.counters.verdicts
        assert session.submit(prompt, Chunk(), extra=3).result().tokens.tolist() == alone(prompt, 4)
        assert server.counters.verdicts == done + 1  # nothing more is computed for the other
        remote.close()
        deaf.stop()


@pytest.mark.parametrize(("estimate", "told"), [(0.3211, 322), (0.0, 0), (1e9, MAX_BUSY_MS)])
def test_a_full_verifier_tells_how_long_it_will_be_busy(
    exact: Model, prompt: Ids, monkeypatch: pytest.MonkeyPatch, estimate: float, told: int
) -> None:
    monkeypatch.setattr("edgellm.verifier.worker.VerifierWorker.wait_seconds", lambda _self: estimate)
    opening = write_open(GREEDY, exact.vocabulary.fingerprint)
    with (
        VerifierServer(exact, ANYWHERE, sessions=2, context=POSITIONS, threads=1, max_waiting=1) as server,
        grpc.insecure_channel(str(server.address)) as channel,
    ):
        first, second, held = Device(channel), Device(channel), Held(monkeypatch)
        first.say(opening, verify(prefix=tuple(prompt.tolist())))
        assert held.asked.wait(60)
        second.say(opening, verify(round=4))
        busy = second.hear().busy
        assert (busy.round, busy.retry_ms) == (4, told)
        held.go.set()
        assert first.hear().WhichOneof("frame") == "verdict"
        second.say(verify(round=5))  # the same session goes on
        assert second.hear().verdict.round == 5
        first.finish()
        second.finish()


def test_a_device_goes_on_alone_and_asks_again_after_the_time_it_was_told(
    exact: Model, prompt: Ids, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.verifier.worker.VerifierWorker.wait_seconds", lambda _self: 0.4)
    long = np.concatenate([prompt] * 8)
    with VerifierServer(exact, ANYWHERE, sessions=2, context=POSITIONS, threads=1, max_waiting=1) as server:
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        other = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        session = remote.open(GenerationState())
        token = session.submit(long, Chunk()).result().tokens
        held = Held(monkeypatch)
        blocking = other.open(GenerationState()).submit(prompt, Chunk())
        assert held.asked.wait(60)
        began = time.monotonic()
        with pytest.raises(VerifierBusy, match=r"tries again in about 0\.4 seconds"):
            session.submit(np.concatenate((long, token)), Chunk()).result()
        until(session.ready)
        assert time.monotonic() - began >= 0.39
        held.go.set()
        blocking.result()
        again = session.submit(np.concatenate((long, token)), Chunk()).result()
        assert again.tokens.tolist() == alone(np.concatenate((long, token)), 1)
        assert again.bytes_up < 30  # the session was kept: only what is new travels
        remote.close()
        other.close()


def test_who_never_finishes_the_first_word_is_hung_up_on(
    exact: Model, monkeypatch: pytest.MonkeyPatch, prompt: Ids, alone: Alone
) -> None:
    quick = [(name, 300 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in channel._SERVER]
    monkeypatch.setattr(channel, "_SERVER", quick)
    with VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1) as server, ExitStack() as stack:
        at = server.address
        silent = [stack.enter_context(socket.create_connection((at.host, at.port), 60.0)) for _ in range(20)]
        for one in silent[::2]:
            one.sendall(b"PRI *")  # a part of HTTP/2's first words
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        assert remote.open(GenerationState()).submit(prompt, Chunk()).result().tokens.tolist() == alone(prompt, 1)
        remote.close()
        for one in silent:
            while one.recv(1024):  # until the server hangs up
                pass

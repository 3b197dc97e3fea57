"""A full verifier says when to come again; a device that does not read is dropped; neither holds the others up."""

import gzip
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Self

import grpc
import numpy as np
import psutil
import pytest

from edgellm.engine import Model
from edgellm.errors import VerifierBusy
from edgellm.rpc import channel
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, MAX_BUSY_MS, MAX_MESSAGE, SESSION
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.services.verification_codec import write_open
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Ids
from edgellm.spec.verification import judge
from edgellm.verifier.scheduler import SchedulerLimits
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


@pytest.mark.parametrize(("estimate", "told"), [(0.3211, 322), (0.0, 50), (1e9, MAX_BUSY_MS)])
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


def test_more_sessions_than_rows_of_a_batch(exact: Model, prompt: Ids, alone: Alone) -> None:
    """Whatever the scheduler may put together, llama.cpp wants room for one row of every sequence, and a chunk fits."""
    limits = SchedulerLimits(rows=2)
    with VerifierServer(exact, ANYWHERE, sessions=4, context=POSITIONS, threads=1, limits=limits) as server:
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        right = Chunk(ids=np.array(alone(prompt, 8), dtype=np.int32))
        verdict = remote.open(GenerationState()).submit(prompt, right).result()
        assert verdict.accepted == 8
        remote.close()


# --- connections that drip and lengths that lie -----------------------------------------------------------------------


LIMIT = 128 * 2**20  # bytes
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + data


def _literal(name: str, value: str) -> bytes:
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()


class Raw:
    """A connection to a verifier, and one call in it, by hand: no gRPC client would send lengths that lie."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection((address.host, address.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(10)

    def begin(self, method: str, **more: str) -> None:
        """Opens the call."""
        names = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
        names |= {"content-type": "application/grpc"} | {key.replace("_", "-"): value for key, value in more.items()}
        headers = b"".join(_literal(name, value) for name, value in names.items())
        self.socket.sendall(PREFACE + frame(_SETTINGS, 0, 0, b"") + frame(_HEADERS, 4, 1, headers))

    def say(self, data: bytes) -> None:
        """A piece of a message."""
        self.socket.sendall(frame(_DATA, 0, 1, data))

    def hear(self, seconds: float = 10.0) -> bytes:
        """All that comes until the call, or the connection, is over; pings are answered."""
        said, held, end = b"", b"", time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if not (more := self.socket.recv(65_536)):
                    return said
            except (TimeoutError, ConnectionError):
                return said
            held += more
            while len(held) >= 9 and len(held) >= 9 + (length := int.from_bytes(held[:3], "big")):
                kind, flags, stream, body = held[3], held[4], held[8], held[9 : 9 + length]
                held = held[9 + length :]
                said += body if kind in (_HEADERS, _GOAWAY) else b""
                if kind == _PING and not flags & 1:
                    self.socket.sendall(frame(_PING, 1, 0, body))
                if kind == _GOAWAY or (stream and (kind == _RESET or (kind == _HEADERS and flags & 1))):
                    return said
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.socket.close()


def prefix(length: int, packed: bool = False) -> bytes:
    """What gRPC puts before a message."""
    return struct.pack(">BI", packed, length)


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def test_messages_that_drip_cost_nothing_and_hold_nobody_up(
    server: VerifierServer, remote: RemoteVerifier, prompt: Ids, alone: Alone
) -> None:
    """Forty sessions announce 16 MiB each, and send them byte by byte."""
    with ExitStack() as stack:
        before = memory()
        slow = [stack.enter_context(Raw(server.address)) for _ in range(40)]
        for one in slow:
            one.begin(SESSION)
            one.say(prefix(MAX_MESSAGE - 1))
        session, text = remote.open(GenerationState()), prompt
        for _ in range(8):
            for one in slow:
                one.say(b"\x12")
            text = np.concatenate((text, session.submit(text, Chunk()).result().tokens))
        session.close()
        assert text[len(prompt) :].tolist() == alone(prompt, 8)
        assert memory() - before < LIMIT


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_the_message_comes(server: VerifierServer, length: int) -> None:
    before = memory()
    with Raw(server.address) as rude:
        rude.begin(SESSION)
        rude.say(prefix(length))
        assert b"larger than max" in rude.hear()
    assert memory() - before < LIMIT


@pytest.mark.parametrize("method", [SESSION, HELLO])
def test_a_message_that_unpacks_to_more_than_the_limit_is_refused(server: VerifierServer, method: str) -> None:
    """Forty-eight megabytes of zeros in fifty kilobytes, which is what a stream may send unasked."""
    bomb = gzip.compress(bytes(48 * 2**20))
    assert len(bomb) < 60_000
    with Raw(server.address) as rude:
        rude.begin(method, grpc_encoding="gzip")
        data = prefix(len(bomb), packed=True) + bomb
        for start in range(0, len(data), 16_384):
            rude.say(data[start : start + 16_384])
        assert b"larger than max" in rude.hear()


def test_who_never_finishes_the_first_word_is_hung_up_on(
    exact: Model, monkeypatch: pytest.MonkeyPatch, prompt: Ids, alone: Alone
) -> None:
    quick = [(name, 300 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in channel._SERVER]
    monkeypatch.setattr(channel, "_SERVER", quick)
    with VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1) as server, ExitStack() as stack:
        silent = [stack.enter_context(Raw(server.address)) for _ in range(20)]
        for one in silent[::2]:
            one.socket.sendall(PREFACE[:5])
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        assert remote.open(GenerationState()).submit(prompt, Chunk()).result().tokens.tolist() == alone(prompt, 1)
        remote.close()
        for one in silent:
            one.hear()  # ends where the server hangs up; the test's own time limit says where it does not
            assert one.socket.recv(1) == b""

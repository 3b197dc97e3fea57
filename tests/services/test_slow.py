"""Connections that drip, lengths that lie, messages that unpack to gigabytes: refused, or waited for without harm."""

from __future__ import annotations

import gzip
import socket
import struct
import time
from contextlib import ExitStack
from typing import Self

import numpy as np
import psutil
import pytest

from edgellm.engine import Model
from edgellm.rpc import channel
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, MAX_MESSAGE, SESSION
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone

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

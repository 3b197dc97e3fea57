"""Connections that drip, lengths that lie, messages that unpack to gigabytes: refused, or waited for without harm."""

from __future__ import annotations

import gzip
import struct
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

from edgellm.engine import Model
from edgellm.rpc import channel
from edgellm.rpc.channel import COMPARE_VOCABULARY, MAX_MESSAGE, SESSION
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone
from tests.services.raw import PREFACE, Raw

LIMIT = 128 * 2**20  # bytes


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


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 2**31, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_the_message_comes(server: VerifierServer, length: int) -> None:
    before = memory()
    with Raw(server.address) as rude:
        rude.begin(SESSION)
        rude.say(prefix(length))
        assert b"larger than max" in rude.hear()
    assert memory() - before < LIMIT


@pytest.mark.parametrize("method", [SESSION, COMPARE_VOCABULARY])
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
    with (
        VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1) as server,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(Raw(server.address)) for _ in range(20)]
        for one in silent[::2]:
            one.socket.sendall(PREFACE[:5])
        remote = RemoteVerifier(server.address, exact.vocabulary, timing=PATIENT)
        assert remote.open(GenerationState()).submit(prompt, Chunk()).result().tokens.tolist() == alone(prompt, 1)
        remote.close()
        for one in silent:
            one.hear()  # ends where the server hangs up; the test's own time limit says where it does not
            assert one.socket.recv(1) == b""

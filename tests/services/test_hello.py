"""The first words between a device and what may be a verifier."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from edgellm.engine import Model, Vocabulary
from edgellm.errors import PairingRequired, ProtocolError, VerifierUnreachable, VocabularyMismatch
from edgellm.rpc.channel import PROTOCOL
from edgellm.services.client.link import Timing
from edgellm.services.client.verifier_client import RemoteVerifier
from testkit.network.relay import Network, Relay
from tests.services.scripted import scripted


@pytest.fixture
def vocabulary(exact: Model) -> Vocabulary:
    return exact.vocabulary


def test_a_verifier_that_does_not_even_say_hello(vocabulary: Vocabulary) -> None:
    """Something accepts the connection and never speaks."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        with pytest.raises(VerifierUnreachable, match="No answer from"):
            RemoteVerifier(f"127.0.0.1:{deaf.getsockname()[1]}", vocabulary, timing=Timing(hello=0.3))
        assert time.monotonic() - began < 60


def test_nobody_there_is_said_with_the_next_step(vocabulary: Vocabulary) -> None:
    with pytest.raises(VerifierUnreachable, match="edgellm serve --role verifier --port 9"):
        RemoteVerifier("127.0.0.1:9", vocabulary)
    with pytest.raises(PairingRequired):  # another machine
        RemoteVerifier("192.0.2.1:50151", vocabulary)


def test_a_verifier_that_is_slow_to_say_hello_is_waited_for(vocabulary: Vocabulary) -> None:
    """As where its machine is busy: somebody listens, so it is not given up at the first deadline."""
    with (
        scripted(vocabulary, lambda _rounds, _context: ()) as address,
        Relay(address.port, Network(100.0, 0.4)) as between,
    ):
        remote = RemoteVerifier(f"127.0.0.1:{between.port}", vocabulary, timing=Timing(hello=0.4))
        assert remote.up()
        remote.close()


def test_what_is_not_a_verifier_is_said(vocabulary: Vocabulary) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(VerifierUnreachable, match="not a verifier"):
            RemoteVerifier(f"127.0.0.1:{port}", vocabulary)
        server.stop(None).wait()


@pytest.mark.parametrize(("version", "older"), [(PROTOCOL + 1, "this device"), (PROTOCOL - 1, "the verifier")])
def test_another_protocol_version_says_who_is_older(vocabulary: Vocabulary, version: int, older: str) -> None:
    with (
        scripted(vocabulary, lambda _rounds, _context: (), {"protocol": version}) as address,
        pytest.raises(ProtocolError, match=f"Update edgellm on {older}"),
    ):
        RemoteVerifier(address, vocabulary)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"context_length": 0}, "a context of 0 tokens"),
        ({"context_length": 31}, "a context of 31 tokens"),
        ({"context_length": 2**31}, "a context of 2147483648 tokens"),
        ({"context_length": 2**32 - 1}, "a context of 4294967295 tokens"),
        ({"vocabulary_size": 0}, "tells of 0 tokens"),
        ({"vocabulary_size": 2**32 - 1}, "tells of 4294967295 tokens"),
        ({"model_hash": b"short"}, "model has a hash of 5 bytes"),
        ({"tokenizer": b"../../short"}, "tokenizer has a hash of 11 bytes"),
    ],
)
def test_figures_that_cannot_be_are_refused(vocabulary: Vocabulary, figures: dict[str, object], said: str) -> None:
    with (
        scripted(vocabulary, lambda _rounds, _context: (), figures) as address,
        pytest.raises(ProtocolError, match=said),
    ):
        RemoteVerifier(address, vocabulary)


def different(vocabulary: Vocabulary, how: str) -> Vocabulary:
    pieces, kinds = list(vocabulary.pieces), bytearray(vocabulary.kinds)
    if how == "bytes":
        pieces[300] = b"\xff\x00 other"
    elif how == "shorter":
        del pieces[300:], kinds[300:]
    elif how == "longer":
        pieces.append(b"more")
        kinds.append(4)
    return Vocabulary.of(pieces, bytes(kinds))


@pytest.mark.parametrize("how", ["bytes", "shorter", "longer"])
def test_another_vocabulary_is_refused(vocabulary: Vocabulary, how: str) -> None:
    with (
        scripted(there := different(vocabulary, how), lambda _rounds, _context: ()) as address,
        pytest.raises(VocabularyMismatch, match=f"of {vocabulary.size} and {there.size} tokens"),
    ):
        RemoteVerifier(address, vocabulary)

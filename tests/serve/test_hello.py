"""The first words between a device and what may be a verifier."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from edgellm.engine import Model, Vocabulary
from edgellm.errors import ProtocolError, VerifierUnreachable, VocabularyMismatch
from edgellm.link.channel import PROTOCOL
from edgellm.serve.connection import Timing
from edgellm.serve.remote import RemoteVerifier
from edgellm.store import fingerprint
from tests.serve.scripted import scripted


@pytest.fixture
def vocabulary(exact: Model) -> Vocabulary:
    return exact.vocabulary


def test_a_verifier_that_does_not_even_say_hello(vocabulary: Vocabulary) -> None:
    """Something accepts the connection and never speaks."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        with pytest.raises(VerifierUnreachable, match="does not answer within"):
            RemoteVerifier(f"127.0.0.1:{deaf.getsockname()[1]}", vocabulary, timing=Timing(hello=0.3))
        assert time.monotonic() - began < 60


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
        scripted(vocabulary, lambda _rounds, _context: iter(()), {"protocol": version}) as address,
        pytest.raises(ProtocolError, match=f"Update edgellm on {older}"),
    ):
        RemoteVerifier(address, vocabulary)


def test_a_verifier_says_which_model_it_is(remote: RemoteVerifier, exact: Model) -> None:
    assert remote.model_hash == fingerprint(exact.path)


@pytest.mark.parametrize(("told", "known"), [(b"", ""), (b"\x01" * 32, "01" * 32)])
def test_one_that_does_not_say_can_be_used_all_the_same(vocabulary: Vocabulary, told: bytes, known: str) -> None:
    with scripted(vocabulary, lambda _rounds, _context: iter(()), {"model_hash": told}) as address:
        verifier = RemoteVerifier(address, vocabulary)
        assert verifier.model_hash == known
        verifier.close()


def test_a_hash_that_is_none_is_refused(vocabulary: Vocabulary) -> None:
    with (
        scripted(vocabulary, lambda _rounds, _context: iter(()), {"model_hash": b"short"}) as address,
        pytest.raises(ProtocolError, match="5 bytes"),
    ):
        RemoteVerifier(address, vocabulary)


def test_a_verifier_without_room_is_refused(vocabulary: Vocabulary) -> None:
    with (
        scripted(vocabulary, lambda _rounds, _context: iter(()), {"context_length": 0}) as address,
        pytest.raises(ProtocolError),
    ):
        RemoteVerifier(address, vocabulary)


def different(vocabulary: Vocabulary, how: str) -> Vocabulary:
    pieces, kinds = list(vocabulary.pieces), bytearray(vocabulary.kinds)
    if how == "bytes":
        pieces[300] = b"\xff\x00 other"
    elif how == "kind":
        kinds[300] ^= 1
    elif how == "shorter":
        del pieces[300:], kinds[300:]
    elif how == "longer":
        pieces.append(b"more")
        kinds.append(1)
    return Vocabulary.of(pieces, bytes(kinds))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("bytes", "token 300 is .* for the draft model and '.xff.x00 other' for the verifier"),
        ("kind", "token 300 is .*kind .* for the draft model and .*kind .* for the verifier"),
        ("shorter", "token 300 is .* for the draft model and missing for the verifier"),
        ("longer", r"token \d+ is missing for the draft model and 'more' for the verifier"),
    ],
)
def test_the_first_differing_token_is_named_on_both_sides(vocabulary: Vocabulary, how: str, said: str) -> None:
    with (
        scripted(different(vocabulary, how), lambda _rounds, _context: iter(())) as address,
        pytest.raises(VocabularyMismatch, match=said),
    ):
        RemoteVerifier(address, vocabulary)

"""A verifier over the link says what the same verifier says in this process."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from edgellm.engine import Model, Vocabulary
from edgellm.errors import PairingRequired, ProtocolError, VerifierLost, VerifierUnreachable
from edgellm.rpc.link import Timing
from edgellm.rpc.protos import PROTOCOL
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY, Chunk, Ids, Sampling, Verdict
from edgellm.verifier.in_process import LocalVerifier
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone
from tests.services.scripted import scripted


def write(session: Session, prompt: Ids, rounds: int, rng: np.random.Generator, n_vocab: int) -> list[Verdict]:
    """Asks about random chunks, whose first tokens are sometimes right; keeps what is accepted."""
    prefix, verdicts = prompt, []
    for _ in range(rounds):
        ids = rng.integers(0, n_vocab, size=rng.integers(0, 5), dtype=np.int32)
        chunk = Chunk(ids=ids, retrieved=bool(len(ids) % 2))
        verdict = session.submit(prefix, chunk, extra=int(rng.integers(0, 3))).result()
        verdicts.append(verdict)
        prefix = np.concatenate((prefix, ids[: verdict.accepted], verdict.tokens))
    return verdicts


def same(one: list[Verdict], other: list[Verdict]) -> bool:
    told = [[(v.accepted, v.tokens.tolist(), v.passes, v.plausible) for v in said] for said in (one, other)]
    return told[0] == told[1]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, top_k=30, seed=11)], ids=["greedy", "sampling"])
def test_the_link_changes_nothing(
    remote: RemoteVerifier, local: LocalVerifier, prompt: Ids, exact: Model, sampling: Sampling
) -> None:
    here, there = local.open(GenerationState(sampling=sampling)), remote.open(GenerationState(sampling=sampling))
    wanted = write(here, prompt, 12, np.random.default_rng(5), exact.n_vocab)
    got = write(there, prompt, 12, np.random.default_rng(5), exact.n_vocab)
    here.close()
    there.close()
    assert same(got, wanted)
    assert any(verdict.plausible for verdict in got)


def test_a_prefix_that_goes_back_is_followed(remote: RemoteVerifier, prompt: Ids, alone: Alone) -> None:
    session = remote.open(GenerationState())
    session.submit(np.concatenate((prompt, prompt)), Chunk()).result()
    verdict = session.submit(prompt, Chunk(), extra=3).result()
    shorter = session.submit(prompt[:5], Chunk()).result()
    session.close()
    assert verdict.tokens.tolist() == alone(prompt, 4)
    assert shorter.tokens.tolist() == alone(prompt[:5], 1)


def test_a_verdict_that_nobody_waited_for_is_given_up(remote: RemoteVerifier, prompt: Ids, alone: Alone) -> None:
    session = remote.open(GenerationState())
    forgotten = session.submit(np.concatenate([prompt] * 8), Chunk(), extra=50)
    verdict = session.submit(prompt, Chunk()).result()
    assert verdict.tokens.tolist() == alone(prompt, 1)
    if forgotten.done():
        with pytest.raises(VerifierLost):
            forgotten.result()
    session.close()


def test_a_closed_connection_loses_everything_in_flight(server: VerifierServer, prompt: Ids) -> None:
    verifier = RemoteVerifier(server.address, server.model.vocabulary, timing=PATIENT)
    session = verifier.open(GenerationState())
    pending = session.submit(np.concatenate([prompt] * 8), Chunk(), extra=200)
    verifier.close()
    with pytest.raises(VerifierLost):
        pending.result()
    assert not session.ready()
    with pytest.raises(VerifierLost, match="closed"):
        session.submit(prompt, Chunk()).result()
    verifier.close()  # twice is once


def test_connections_and_servers_leave_no_trace(exact: Model, prompt: Ids, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's poller calls into every loop that it has known; of those that have ended, asyncio complains."""
    for _ in range(4):
        with VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1) as short:
            lines = [RemoteVerifier(short.address, exact.vocabulary, timing=PATIENT) for _ in range(2)]
            for line in lines:
                session = line.open(GenerationState())
                session.submit(prompt, Chunk()).result()
                session.close()
                line.close()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


# --- the greeting -----------------------------------------------------------------------------------------------------


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


def test_what_is_not_a_verifier_is_said(vocabulary: Vocabulary) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(VerifierUnreachable, match="not a verifier"):
            RemoteVerifier(f"127.0.0.1:{port}", vocabulary)
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"protocol": PROTOCOL + 1}, "Update edgellm on this device"),
        ({"protocol": PROTOCOL - 1}, "Update edgellm on the verifier"),
        ({"context_length": 0}, "a context of 0 tokens"),
        ({"context_length": 2**31}, "a context of 2147483648 tokens"),
        ({"context_length": 2**32 - 1}, "a context of 4294967295 tokens"),
        ({"vocabulary_size": 0}, "tells of 0 tokens"),
        ({"vocabulary_size": 2**32 - 1}, "tells of 4294967295 tokens"),
        ({"model_hash": b"short"}, "model has a hash of 5 bytes"),
        ({"tokenizer": b"../../short"}, "tokenizer has a hash of 11 bytes"),
    ],
)
def test_impossible_greetings_are_refused(vocabulary: Vocabulary, figures: dict[str, object], said: str) -> None:
    with scripted(vocabulary, hello=figures) as address, pytest.raises(ProtocolError, match=said):
        RemoteVerifier(address, vocabulary)


def different(vocabulary: Vocabulary) -> Vocabulary:
    pieces = list(vocabulary.pieces)
    pieces[300] = b"\xff\x00 other"
    return Vocabulary.of(pieces, bytes(vocabulary.kinds))

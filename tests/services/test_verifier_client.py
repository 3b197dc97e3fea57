"""A verifier over the link says what the same verifier says in this process."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.errors import VerifierLost
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY, Chunk, Ids, Sampling, Verdict
from edgellm.verifier.in_process import LocalVerifier
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone


def write(session: Session, prompt: Ids, rounds: int, rng: np.random.Generator, n_vocab: int) -> list[Verdict]:
    """Asks about random chunks, whose first tokens are sometimes right; keeps what is accepted."""
    prefix, verdicts = prompt, []
    for _ in range(rounds):
        ids = rng.integers(0, n_vocab, size=rng.integers(0, 5), dtype=np.int32)
        verdict = session.submit(prefix, Chunk(ids=ids), extra=int(rng.integers(0, 3))).result()
        verdicts.append(verdict)
        prefix = np.concatenate((prefix, ids[: verdict.accepted], verdict.tokens))
    return verdicts


def same(one: list[Verdict], other: list[Verdict]) -> bool:
    return [(v.accepted, v.tokens.tolist(), v.passes) for v in one] == [
        (v.accepted, v.tokens.tolist(), v.passes) for v in other
    ]


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


def test_what_of_a_copied_chunk_may_still_come_is_said_over_the_link_too(
    remote: RemoteVerifier, local: LocalVerifier, prompt: Ids, alone: Alone
) -> None:
    right = np.array(alone(prompt, 8), dtype=np.int32)
    wrong = right.copy()
    wrong[1] = 300 if right[1] != 300 else 301  # a random token
    marks = []
    for verifier in (local, remote):
        session = verifier.open(GenerationState())
        marks += [
            session.submit(prompt, Chunk(ids=wrong, retrieved=copied)).result().plausible for copied in (True, False)
        ]
        session.close()
    assert marks[0] == marks[2]
    assert marks[0] is not None
    assert marks[0][:2] == (True, False)
    assert marks[1] is marks[3] is None


def test_only_new_tokens_travel(remote: RemoteVerifier, prompt: Ids) -> None:
    session = remote.open(GenerationState())
    long = np.concatenate([prompt] * 8)
    first = session.submit(long, Chunk()).result()
    second = session.submit(np.concatenate((long, first.tokens)), Chunk()).result()
    session.close()
    assert first.bytes_up > len(long)
    assert 0 < second.bytes_up < 30
    assert 0 < second.bytes_down < 40


def test_a_prefix_that_goes_back_is_followed(remote: RemoteVerifier, prompt: Ids, alone: Alone) -> None:
    session = remote.open(GenerationState())
    session.submit(np.concatenate((prompt, prompt)), Chunk()).result()
    verdict = session.submit(prompt, Chunk(), extra=3).result()
    shorter = session.submit(prompt[:5], Chunk()).result()
    session.close()
    assert verdict.tokens.tolist() == alone(prompt, 4)
    assert shorter.tokens.tolist() == alone(prompt[:5], 1)


def test_an_evicted_session_is_rebuilt_from_resent_tokens(
    remote: RemoteVerifier, server: VerifierServer, prompt: Ids, alone: Alone
) -> None:
    sessions = [remote.open(GenerationState()) for _ in range(server.sessions + 2)]
    wanted = alone(prompt, 6)
    before = server.counters.evictions
    for step in range(6):
        for session in sessions:
            prefix = np.concatenate((prompt, np.array(wanted[:step], dtype=np.int32)))
            verdict = session.submit(prefix, Chunk()).result()
            assert verdict.tokens.tolist() == [wanted[step]]
    for session in sessions:
        session.close()
    assert server.counters.evictions > before


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


def test_connections_and_servers_come_and_go_without_a_trace(
    exact: Model, prompt: Ids, caplog: pytest.LogCaptureFixture
) -> None:
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


# --- a verifier that sleeps -------------------------------------------------------------------------------------------

"""Replies that are written from within the process that serves the verifier."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.errors import EngineFailed
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk
from tests.spec.real import case, ids


@pytest.fixture(scope="module")
def server(f32_pair: tuple[Path, Path]) -> Iterator[VerifierServer]:
    with (
        Model.load(f32_pair[1]) as model,
        VerifierServer(model, Address.parse("127.0.0.1:0"), context=512, sessions=2, threads=1) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def plain(f32_pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM.open("none", f32_pair[1], threads=1) as opened:
        yield opened


def test_the_text_is_the_verifiers_also_for_more_replies_than_it_has_room_for(
    server: VerifierServer, plain: LLM
) -> None:
    found: dict[int, list[int]] = {}
    with LLM(server.model, verifier=server.inside(), threads=1) as pair:

        def write(number: int) -> None:
            found[number] = ids(pair.reply(case(number), max_tokens=16, retrieval="off"))

        threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: ids(plain.reply(case(number), max_tokens=16)) for number in range(5)}
    assert server.counters.evictions > 0


def test_it_copies_too_and_tells_probabilities(server: VerifierServer, plain: LLM, rows_are_cheap: None) -> None:
    with LLM(server.model, verifier=server.inside(), threads=1) as pair:
        for number in (2, 3):
            wanted = ids(plain.reply(case(number), max_tokens=24))
            assert ids(pair.reply(case(number), max_tokens=24)) == wanted
            told = list(pair.reply(case(number), max_tokens=24, logprobs=0))
            assert [token.id for token in told] == wanted
            assert all(token.logprobs is not None for token in told)


def test_a_reply_that_is_left_gives_its_place_back(server: VerifierServer, plain: LLM) -> None:
    with LLM(server.model, verifier=server.inside(), threads=1) as pair:
        for _ in range(6):
            left = pair.reply(case(1), max_tokens=16)
            next(left)
            left.close()
        assert ids(pair.reply(case(1), max_tokens=8)) == ids(plain.reply(case(1), max_tokens=8))


def test_what_is_asked_of_an_ended_server_fails(f32_pair: tuple[Path, Path]) -> None:
    with Model.load(f32_pair[1]) as model:
        server = VerifierServer(model, Address.parse("127.0.0.1:0"), context=64, sessions=1, threads=1)
        server.start()
        session = server.inside().open(GenerationState())
        prompt = np.ones(4, dtype=np.int32)
        assert len(session.submit(prompt, Chunk(NO_IDS)).result().tokens) == 1
        server.stop()
        with pytest.raises(EngineFailed, match="has ended"):
            session.submit(prompt, Chunk(NO_IDS)).result()

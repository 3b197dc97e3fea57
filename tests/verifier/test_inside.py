"""Replies that are written from within the process that serves the verifier."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.engine.hardware import Hardware
from edgellm.errors import EngineFailed
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.protocols import GenerationState
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


def test_the_text_is_the_verifiers_also_for_more_replies_than_have_room(server: VerifierServer, plain: LLM) -> None:
    with LLM(server.model, verifier=server.inside(), threads=1) as pair, ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda n: ids(pair.reply(case(n), max_tokens=16, retrieval="off")), range(5)))
    assert found == [ids(plain.reply(case(number), max_tokens=16)) for number in range(5)]
    assert server.counters.evictions > 0


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


@pytest.mark.parametrize("reproducible", [False, True])
def test_replies_share_passes_and_are_what_each_is_alone(f32_pair: tuple[Path, Path], reproducible: bool) -> None:
    """Where that is asked for, they are the same to the bit."""
    hardware = Hardware(n_ctx=512, threads=1, reproducible=reproducible)
    with LLM.open(*f32_pair, hardware=hardware, replies=4) as pair:

        def write(number: int) -> list[tuple[int, float]]:
            tokens = list(pair.reply(case(number), max_tokens=16, logprobs=0))
            return [(token.id, token.logprobs.own) for token in tokens if token.logprobs is not None]

        verifier = pair.engine.verifier
        assert verifier is not None
        alone = [write(number) for number in range(4)]
        assert verifier.shared == 0
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):  # On a busy machine one reply can end before another begins.
                together = list(pool.map(write, range(4)))
                if verifier.shared:
                    break
        assert verifier.shared > 0
    assert [[token for token, _ in one] for one in together] == [[token for token, _ in one] for one in alone]
    assert not reproducible or together == alone


def test_a_model_alone_writes_what_it_drafts_and_shares_passes(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[1], "none", threads=1, replies=2) as pair, ThreadPoolExecutor(2) as pool:
        alone = [ids(pair.reply(case(number), max_tokens=16)) for number in range(2)]
        verifier = pair.engine.drafting.self_verifier()
        for _ in range(20):  # On a busy machine one reply can end before the other begins.
            assert list(pool.map(lambda number: ids(pair.reply(case(number), max_tokens=16)), range(2))) == alone
            if verifier.shared:
                break
        assert verifier.shared > 0


def test_lone_replies_have_drafts_and_others_tokens_together(f32_pair: tuple[Path, Path], rows_are_cheap: None) -> None:
    with LLM.open(*f32_pair, threads=1, replies=2) as pair:
        first, second = (pair.reply(case(number), max_tokens=16) for number in (2, 3))
        ids(first, 1), ids(second, 1)  # both are begun, so that they share passes from now on
        ids(first)
        before = first.summary.drafted
        ids(second)
        assert (before, second.summary.drafted) == (first.summary.drafted, 0)
        assert first.summary.rounds < first.summary.tokens / 2 < second.summary.rounds
        third = pair.reply(case(2), max_tokens=16)
        ids(third)
        assert third.summary.drafted > 0

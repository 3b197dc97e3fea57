"""With everything verified a reply is the verifier's own: evicted, cut off, reconnected, busy, with guesses ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.services.server.verification_service import Queue
from edgellm.spec.types import Notice, Source, Token
from tests.spec.real import case, ids

NUMBERS = (2, 5, 6)
MOST = 24


@pytest.fixture(scope="module")
def big(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[1]) as model:
        yield model


@pytest.fixture(scope="module")
def wanted(f32_pair: tuple[Path, Path]) -> dict[int, list[int]]:
    with LLM.open("none", f32_pair[1], threads=1) as alone:
        return {number: ids(alone.reply(case(number), max_tokens=MOST)) for number in NUMBERS}


def serve(model: Model, port: int = 0, sessions: int = 2) -> VerifierServer:
    return VerifierServer(model, Address("127.0.0.1", port), context=512, sessions=sessions, threads=1)


def test_replies_that_push_each_other_out_of_the_verifier(
    f32_pair: tuple[Path, Path], big: Model, wanted: dict[int, list[int]]
) -> None:
    with serve(big, sessions=1) as server, LLM.open(f32_pair[0], str(server.address), threads=1) as pair:
        replies = [pair.reply(case(number), max_tokens=MOST, budget=1.0) for number in NUMBERS]
        rows = list(zip_longest(*replies))
        for at, number in enumerate(NUMBERS):
            assert [row[at].id for row in rows if row[at] is not None] == wanted[number]
        assert sum(reply.summary.guesses_tried for reply in replies) > 0
        assert server.counters.evictions > 0


def check_verified(model: Model, prompt: np.ndarray, written: list[Token]) -> None:
    """Every token that the verifier vouches for is what it says after all tokens before it."""
    text = np.concatenate((prompt, np.array([token.id for token in written], dtype=np.int32)))
    with Context(model, ContextSpec(n_ctx=len(text), threads=1)) as context:
        says = context.decode(text[:-1], outputs=len(written)).argmax(axis=1)
    for token, said in zip(written, says.tolist(), strict=True):
        assert token.source in (Source.DRAFT, Source.PARALLEL) or token.id == said


def test_a_busy_verifier_is_told_as_busy_and_asked_again(
    f32_pair: tuple[Path, Path], big: Model, wanted: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []
    monkeypatch.setattr("edgellm.verifier.worker.VerifierWorker.wait_seconds", lambda _self: 0.06)
    monkeypatch.setattr(Queue, "full", lambda _self, _device: bool(full and full.pop()))
    with (
        serve(big) as server,
        LLM.open(f32_pair[0], str(server.address), threads=1) as pair,
        LLM.open(None, str(server.address), tokenizer=f32_pair[0]) as bare,
    ):
        for with_draft, who in ((True, pair), (False, bare)):
            news: list[Notice] = []
            reply = who.reply(case(5), max_tokens=MOST, budget=1.0)
            reply.listen(on_notice=news.append)
            written = [next(reply)]
            full.append(True)  # once
            written += reply
            assert "busy for about 0.1 seconds" in news[0].text
            check_verified(big, pair.prompt_ids(case(5)), written)
            if not with_draft:
                assert [token.id for token in written] == wanted[5]
                assert "The reply waits" in news[0].text

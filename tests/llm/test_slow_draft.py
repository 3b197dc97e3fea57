"""A draft model that does not pay is dropped, here and across a link, whatever else is on or off; and that is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.llm import LLM
from edgellm.llm.reply import DRAFT_MODEL
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.types import Chunk, Decision, Notice, Round, Verdict
from tests.spec.real import case

OPTIONS: list[dict[str, Any]] = [
    {"retrieval": "off"},
    {"retrieval": "off", "gate": "always"},
    {"retrieval": "off", "gamma": 4},
    {"gate": "always", "gamma": 4},
    {"gate": "random", "budget": 1.0, "retrieval": "off"},
]


@pytest.fixture(params=["here", "across a link"])
def slow(request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], server: VerifierServer) -> Iterator[LLM]:
    """A pair that has seen how long its draft model takes."""
    verifier = f32_pair[1] if request.param == "here" else str(server.address)
    with LLM.open(f32_pair[0], verifier, threads=1, history=False) as opened:
        teach(opened.engine.retrieval.index.policy)
        yield opened


def teach(policy: DraftPolicy) -> None:
    """Tell of replies in which a token took ten times as long with the draft model."""
    for _ in range(8):
        policy.begin(10, DRAFT_MODEL)
        for asked in (0, 0, 4, 4):
            chunk, seconds = Chunk(np.ones(asked, np.int32), np.ones(asked, np.float32)), 10.0 if asked else 1.0
            if asked:
                policy.drafted(asked, seconds - 1.0)
            verdict = Verdict(0, np.ones(1, np.int32))
            policy.observe(Round(0, chunk, Decision(True, ""), verdict, 0.0, seconds - 1.0, seconds))
        policy.end()


def test_a_draft_model_that_does_not_pay_drafts_nothing_and_that_is_said_once(slow: LLM) -> None:
    told: list[Notice] = []
    for options in OPTIONS:
        reply = slow.reply(case(1), max_tokens=16, **options)
        reply.listen(on_notice=told.append)
        tokens = list(reply)
        assert not any(token.source.value == "accepted" for token in tokens), options
        assert reply.summary.drafted == reply.summary.retrieved or "retrieval" not in options, options
    assert len(told) == 1
    assert "with the draft model" in told[0].text


def test_nor_does_it_in_a_reply_beside_another_one(slow: LLM) -> None:
    first = slow.reply(case(1), max_tokens=8)
    next(first)
    second = slow.reply(case(2), max_tokens=8)
    assert len(list(second)) > 0
    assert second.summary.drafted == 0
    first.close()


def test_drafts_that_are_asked_for_are_made(slow: LLM) -> None:
    reply = slow.reply(case(1), max_tokens=16, retrieval="off", gate="always", gamma=4)
    assert list(reply)
    assert reply.summary.drafted > 0

"""Each switch alone, on the real pair; and with everything verified no switch changes a token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.llm import LLM
from edgellm.llm.reply import DRAFT_MODEL
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.params import GATES
from edgellm.spec.types import Chunk, Decision, Notice, Round, Source, Verdict
from edgellm.verifier.in_process import EXTRA_TOKENS
from tests.spec.real import case, ids, prompts, told

BUDGETED = sorted(set(GATES) - {"always", "never"})


@pytest.fixture
def linked(f32_pair: tuple[Path, Path], profile_path: Path, address: str) -> Iterator[LLM]:
    with LLM.open(f32_pair[0], address, profile=profile_path, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("gate", ["never", *BUDGETED])
def test_with_a_budget_of_nothing_the_draft_model_writes(profiled: LLM, f32_pair: tuple[Path, Path], gate: str) -> None:
    with LLM.open(f32_pair[0], None, threads=1) as small:
        wanted = ids(small.reply(case(3), max_tokens=24))
        reply = profiled.reply(case(3), max_tokens=24, gate=gate, budget=0.0)
        assert ids(reply) == wanted
        assert reply.summary.verifier_passes_per_token == 0


def test_options_for_a_model_that_is_not_there_are_not_ignored_in_silence(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(None, f32_pair[1], threads=1) as large, LLM.open(f32_pair[0], None, threads=1) as small:
        said = told(large.reply("Where is the mug?", max_tokens=2, early_exit=True))
        assert any("early exit has no effect" in one for one in said)
        assert "the draft model writes alone" in told(small.reply("Hello", max_tokens=4, budget=0.2))[0]


def test_early_exit_is_seen_in_the_tokens(profiled: LLM) -> None:
    for number in range(4):
        reply = profiled.reply(case(number), max_tokens=24, early_exit=True, gate="never")
        exits = [token.exit_layer for token in reply]
        # the token that ends the turn is drafted, and not among those of the reply
        assert 0 <= reply.summary.exits - sum(layer is not None for layer in exits) <= 1
        if reply.summary.exits:
            return
    pytest.fail("no token left early")


@pytest.mark.parametrize("gate", ["synera", "importance"])
def test_importance_is_measured_where_the_gate_needs_it(profiled: LLM, gate: str) -> None:
    tokens = list(profiled.reply(case(5), max_tokens=24, gate=gate, budget=0.5))
    assert any(token.importance for token in tokens)
    assert not any(token.importance for token in profiled.reply(case(5), max_tokens=24, gate="random", budget=0.5))


def test_parallel_inference_guesses_across_a_link_and_not_beside_the_verifier(linked: LLM, profiled: LLM) -> None:
    tried = hit = 0
    for number in (1, 4, 5):  # in the last of which a guess is wrong
        reply = linked.reply(case(number), max_tokens=32, retrieval="off", gate="always", gamma=4)
        list(reply)
        summary = reply.summary
        tried, hit = tried + summary.guesses_tried, hit + summary.guesses_hit
        assert summary.guesses_hit <= summary.guesses_tried <= summary.chunks_verified
        assert summary.stall_hidden is None or 0.0 <= summary.stall_hidden <= 1.0
        assert summary.bytes_per_chunk is not None
    assert 0 < hit < tried
    for reply in (linked.reply(case(1), max_tokens=24, parallel=False), profiled.reply(case(1), max_tokens=24)):
        list(reply)
        assert (reply.summary.guesses_tried, reply.summary.stall_hidden) == (0, None)


@pytest.mark.parametrize("gate", ["auto", "synera", "importance"])
def test_gates_that_need_importance_work_with_guesses_ahead(linked: LLM, gate: str) -> None:
    decided = offloaded = hits = 0
    for messages in prompts(2002):
        reply = linked.reply(messages, max_tokens=48, gate=gate, budget=0.4)
        sources = {token.source for token in reply}
        assert sources <= set(Source) - {Source.VERIFIER, Source.RETRIEVED}
        decided, offloaded = decided + reply.summary.rounds, offloaded + reply.summary.chunks_verified
        hits += reply.summary.guesses_hit
    assert offloaded / decided == pytest.approx(0.4, abs=0.15)  # of about 40 decisions
    assert hits > 0


def test_without_drafts_a_link_brings_several_tokens_at_once(linked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.spec.drafters.model.HybridDrafter.propose", lambda *_given: Chunk())
    reply = linked.reply(case(1), max_tokens=24)
    list(reply)
    assert reply.summary.tokens > 8
    assert reply.summary.rounds <= -(-reply.summary.tokens // (1 + EXTRA_TOKENS)) + 1


# --- a draft model that does not pay ----------------------------------------------------------------------------------


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
        teach(opened.engine.drafting.policy)
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


def test_a_draft_model_that_does_not_pay_drafts_nothing_and_that_is_said_once(slow: LLM) -> None:
    heard: list[Notice] = []
    for options in OPTIONS:
        reply = slow.reply(case(1), max_tokens=16, **options)
        reply.listen(on_notice=heard.append)
        tokens = list(reply)
        assert not any(token.source.value == "accepted" for token in tokens), options
        assert reply.summary.drafted == reply.summary.retrieved or "retrieval" not in options, options
    assert len(heard) == 1
    assert "with the draft model" in heard[0].text


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

"""Each switch alone, on the real pair; and with everything verified no switch changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.llm import LLM
from edgellm.spec.params import GATES
from edgellm.spec.types import Chunk, Notice, Source
from edgellm.verifier.in_process import EXTRA_TOKENS
from tests.llm.conftest import ASKED, prompts
from tests.spec.real import case, ids

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


def test_an_early_exit_without_a_draft_model_is_not_ignored_in_silence(verifier_path: Path) -> None:
    told: list[Notice] = []
    with LLM.open(None, verifier_path, threads=1, history=False) as llm:
        reply = llm.reply("Where is the mug?", max_tokens=2, early_exit=True)
        reply.listen(on_notice=told.append)
        assert list(reply)
    assert any("early exit has no effect" in notice.text for notice in told)


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
    for messages in prompts(ASKED, 1):
        reply = linked.reply(messages, max_tokens=48, gate=gate, budget=0.4)
        sources = {token.source for token in reply}
        assert sources <= set(Source) - {Source.VERIFIER, Source.RETRIEVED}
        decided, offloaded = decided + reply.summary.rounds, offloaded + reply.summary.chunks_verified
        hits += reply.summary.guesses_hit
    assert offloaded / decided == pytest.approx(0.4, abs=0.15)  # of about 40 decisions
    assert hits > 0


def test_a_budget_without_a_verifier_is_told(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[0], None, threads=1) as small:
        heard: list[Notice] = []
        reply = small.reply("Hello", max_tokens=4, budget=0.2)
        reply.listen(on_notice=heard.append)
        assert list(reply)
        assert "the draft model writes alone" in heard[0].text


def test_a_linked_verifier_writes_several_tokens_at_once_where_nothing_is_drafted(
    linked: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.spec.drafters.model.HybridDrafter.propose", lambda *_given: Chunk())
    reply = linked.reply(case(1), max_tokens=24)
    list(reply)
    assert reply.summary.tokens > 8
    assert reply.summary.rounds <= -(-reply.summary.tokens // (1 + EXTRA_TOKENS)) + 1

"""A profile, gates and budgets with a stock server as the verifier."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.llm import LLM
from edgellm.spec.gates.profile import Profile
from edgellm.spec.types import Source, Token
from testkit.upstream.engine import Engine
from tests.spec.real import case
from tests.upstream.conftest import MOST, WAYS, open_pair

PROMPTS = [case(number) for number in range(20, 24)]


@pytest.fixture(scope="module")
def here(f32_pair: tuple[Path, Path]) -> Profile:
    """The profile of the same pair, with the verifier in this process."""
    with LLM.open(*f32_pair, threads=1, history=False) as pair:
        return pair.profile(PROMPTS, max_tokens=MOST)


@pytest.mark.parametrize("way", ["vllm-score", "vllm-fan-out", "llama-server", "ollama"])
def test_a_profile_is_the_same_and_its_budget_is_kept(
    way: str, engine: Engine, f32_pair: tuple[Path, Path], here: Profile, closing: ExitStack
) -> None:
    make, tier = WAYS[way]
    pair, server = open_pair(closing, make(engine), f32_pair[0], tier)
    found = pair.profile(PROMPTS, max_tokens=MOST)
    assert (found.chunks, found.acceptance, found.alpha) == (here.chunks, here.acceptance, here.alpha)
    assert found.c_th == pytest.approx(here.c_th)
    assert found.verify_seconds > 0.0
    asked = len(server.requests)
    written: list[Token] = []
    for number in (2, 5):
        reply = pair.reply(case(number), max_tokens=48, budget=0.3, gate="auto", retrieval="off")
        written += reply
        share = reply.summary.share_verified
        assert share is not None
        assert 0.0 < share < 1.0
    assert any(token.source is Source.DRAFT for token in written)
    assert len(server.requests) > asked

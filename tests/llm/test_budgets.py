"""A budget is what is really spent, on prompts that were not profiled, through a pair and over its replies."""

from __future__ import annotations

import pytest

from edgellm.llm import LLM
from tests.llm.conftest import ASKED, prompts


@pytest.mark.parametrize(
    ("gate", "budget"),
    [("auto", 0.1), ("auto", 0.4), ("synera", 0.2), ("confidence", 0.2), ("random", 0.2)],
)
def test_the_realised_share_is_the_budget(profiled: LLM, gate: str, budget: float) -> None:
    decided = offloaded = 0
    for messages in prompts(ASKED, 2):
        reply = profiled.reply(messages, max_tokens=80, gate=gate, budget=budget, seed=1)
        list(reply)
        decided += reply.summary.rounds
        offloaded += reply.summary.chunks_verified
    share = reply.summary.share_offloaded
    assert decided > 100
    assert share == pytest.approx(budget, abs=0.03)
    assert offloaded / decided == pytest.approx(budget, abs=0.03)  # counted by the replies, and not by the ledger


def test_each_budget_of_a_pair_has_its_own_account(profiled: LLM) -> None:
    for messages in prompts(ASKED, 1):
        for budget in (1.0, 0.3):
            reply = profiled.reply(messages, max_tokens=40, budget=budget)
            list(reply)
    assert reply.summary.share_offloaded is not None
    assert 0.0 < reply.summary.share_offloaded < 0.5

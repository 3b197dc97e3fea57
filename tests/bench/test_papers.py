"""The papers' pictures: what is counted in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.papers.frontier import WholeReplies, costs
from bench.synera.baselines import ReplyRule
from bench.synera.stalls import Method
from edgellm.llm import LLM
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController
from models.pairs import PAIRS
from testkit.questions import questions

ASKED = questions(1)


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with LLM.open(threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM.open("none", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_a_reply_that_is_written_again_counts_once_and_takes_the_time_of_both(
    pair: LLM, alone: LLM, budget: float
) -> None:
    rule = ReplyRule(Profile.load(PAIRS["home"].profile), budget, BudgetController())
    edgefm, kept = WholeReplies(rule, alone), Method({"gate": "never"} if budget == 0.0 else {})
    for seed, question in enumerate(ASKED):
        edgefm.answer(pair, question, seed)
        kept.answer(alone if budget else pair, question, seed)
    assert (edgefm.scores, edgefm.written, edgefm.passes) == (kept.scores, kept.written, kept.passes)
    # of a reply that stays the first round is not counted; of one that is written again every token came after it
    assert edgefm.tokens == (kept.written if budget else kept.tokens)
    assert len(edgefm.between) == len(ASKED)


def test_costs_are_shares_of_those_of_the_verifier_alone() -> None:
    cloud = {"passes_per_token": 1.05, "between_ms": 70.0, "from_verifier": 1.0}
    assert costs(cloud, cloud) == {"cost_by_passes": 1.0, "cost_by_estimate": 1.0}
    row = {"passes_per_token": 0.21, "between_ms": 35.0, "from_verifier": 0.2}
    assert costs(row, cloud) == pytest.approx({"cost_by_passes": 0.2, "cost_by_estimate": 0.1})

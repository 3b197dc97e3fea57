"""The baselines that gates are compared with, on the bundled pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.synera.baselines import edgefm, hybrid, hybrid_gate
from edgellm.llm import LLM
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController
from models.pairs import PAIRS
from testkit.questions import answered, questions, reply_with

ASKED = questions(3)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load(PAIRS["home"].profile)


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with LLM.open(threads=1) as opened:
        yield opened


def test_hybrid_decides_token_by_token_and_keeps_its_budget(pair: LLM, profile: Profile) -> None:
    controller = BudgetController()
    reply = pair.reply(
        ASKED[0].messages, max_tokens=24, retrieval="off", gamma=1, gate=hybrid_gate(profile, 0.5, controller)
    )
    list(reply)
    assert reply.summary.drafted == reply.summary.rounds == controller.decided
    answers = hybrid(pair, profile, 0.3, ASKED)
    assert len(answers.scores) == len(ASKED)
    assert answers.share == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_edgefm_keeps_every_reply_or_has_every_one_written_again(pair: LLM, profile: Profile, budget: float) -> None:
    asked = ASKED[:6]
    with LLM.open("none", threads=1) as alone, LLM.open(verifier="none", threads=1) as small:
        wanted = answered(asked, reply_with(alone if budget else small))
        answers = edgefm(pair, alone, profile, budget, asked)
    assert answers.share == budget
    assert answers.scores == wanted.scores

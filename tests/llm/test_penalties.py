"""Min-p, penalties and biases are the verifier's rule: with drafts the text is its own, here and served."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.spec.protocols import Capabilities
from tests.spec.real import case, ids

NUMBERS = (2, 5)
MOST = 24
RULES: tuple[dict[str, Any], ...] = (
    {"repeat_penalty": 1.4},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repeat_penalty": 1.3, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.02},
    {"presence_penalty": 2.0, "temperature": 1.2, "min_p": 0.1},
)


def rule_id(rule: dict[str, Any]) -> str:
    return "-".join(rule)


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_greedy_text_with_drafts_is_the_verifiers_own(alone: LLM, pair: LLM, served: LLM, rule: dict[str, Any]) -> None:
    greedy = {**rule, "temperature": 0.0}
    for number in NUMBERS:
        wanted = ids(alone.reply(case(number), max_tokens=MOST, **greedy))
        for other in (pair, served):
            reply = other.reply(case(number), max_tokens=MOST, **greedy)
            assert ids(reply) == wanted
            assert reply.summary.share_verified == 1.0


@pytest.mark.parametrize("rule", [rule for rule in RULES if "temperature" in rule], ids=rule_id)
def test_sampled_text_is_the_verifiers_own_for_a_seed(alone: LLM, pair: LLM, served: LLM, rule: dict[str, Any]) -> None:
    for number in NUMBERS:
        asked: dict[str, Any] = {"max_tokens": MOST, "seed": 9, **rule}
        wanted = ids(alone.reply(case(number), retrieval="off", **asked))
        assert ids(alone.reply(case(number), retrieval="context,history", **asked)) == wanted
        for one in (pair, served):
            assert ids(one.reply(case(number), **asked)) == wanted
            assert ids(one.reply(case(number), retrieval="off", gamma=2, **asked)) == wanted


def test_a_penalty_and_a_bias_change_greedy_text(alone: LLM) -> None:
    plain = ids(alone.reply(case(2), max_tokens=MOST))
    assert len(set(plain)) < len(plain)
    penalised = ids(alone.reply(case(2), max_tokens=MOST, presence_penalty=100.0))
    assert len(set(penalised)) == len(penalised)
    banned = ids(alone.reply(case(2), max_tokens=MOST, logit_bias={plain[0]: -100.0}))
    assert plain[0] not in banned
    forced = ids(alone.reply(case(2), max_tokens=4, logit_bias={plain[1]: 100.0}))
    assert forced == [plain[1]] * 4


def test_the_draft_model_follows_the_penalties(pair: LLM) -> None:
    """Otherwise it would draft the very tokens that the verifier avoids."""
    options: dict[str, Any] = {"max_tokens": MOST, "retrieval": "off", "gate": "always"}
    replies = [pair.reply(case(2), presence_penalty=amount, **options) for amount in (0.0, 4.0)]
    rates = []
    for reply in replies:
        ids(reply)
        rates.append(reply.summary.acceptance_rate or 0.0)
    assert rates[1] > 0.5 * rates[0]


def test_a_verifier_that_applies_no_penalties_is_not_asked(served: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capabilities, "penalties", False)
    with pytest.raises(InvalidOption, match="use a verifier of edgellm"):
        served.reply(case(2), presence_penalty=0.1)
    assert ids(served.reply(case(2), max_tokens=2, min_p=0.1, temperature=1.0))

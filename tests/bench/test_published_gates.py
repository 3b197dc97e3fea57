"""Gates of other papers, rebuilt on the bundled pair."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.pipesd import Trigger
from bench.papers.published_gates import (
    OURS,
    PUBLISHED,
    Opened,
    confspec,
    observations,
    pipesd,
    plot,
    r2r,
    table,
    worse,
)
from bench.papers.rebuilt_gates import (
    AT_ONCE,
    BALANCES,
    NEVER,
    STEP,
    Budget,
    ChunkThreshold,
    Observations,
    PipeSDDrafter,
    StepDrafter,
    TriggerCurve,
    balanced,
    share_spent,
    token_run,
)
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round, Verdict
from models.profile import SEED
from testkit.questions import Answers, questions, reply_with

ASKED = questions(3)
HALF = 0.5


class Fixed(TriggerCurve):
    """Thresholds that do not follow a budget."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def at(self, share: float) -> Trigger:
        return self._trigger


class Lines(Drafter):
    """Drafts tokens of its own: 1 ends a line."""

    def __init__(self, *ids: int) -> None:
        self._ids = np.array(ids, dtype=np.int32)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        ids = self._ids[:gamma]
        ones = np.ones(len(ids), dtype=np.float32)
        return Chunk(ids, ones, ones)


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with ExitStack() as closing:
        pair = argparse.Namespace(draft="edgellm-draft", verifier="edgellm-verifier", profile=None)
        yield Opened.of(pair, closing)


@pytest.fixture(scope="module")
def seen(opened: Opened) -> Observations:
    runs, replies = zip(*observations(opened, enumerate(questions(2, SEED))), strict=True)
    return Observations.of(runs, replies)


@pytest.mark.parametrize(
    "trigger", [Trigger(96, 0.5, 0.0), Trigger(96, 0.05, 0.0), Trigger(96, 0.0, 0.7), Trigger(96, 0.2, 0.4), NEVER]
)
def test_a_draft_ends_where_a_trigger_fires_and_not_before(opened: Opened, trigger: Trigger) -> None:
    drafter, fired = PipeSDDrafter(opened.drafter, Fixed(trigger), Budget(HALF)), 0
    for question in ASKED[:8]:
        state = GenerationState(opened.pair.prompt_ids(question.messages))
        chunk = drafter.propose(state, 40)
        values = chunk.confidence
        assert not any(trigger.fires(values[:n]) for n in range(1, len(values)))
        fired += trigger.fires(values)
        assert trigger.fires(values) or len(chunk) == 40 or opened.small.is_eog(int(chunk.ids[-1]))
    assert (fired > 0) == (trigger is not NEVER)


def test_a_draft_that_no_trigger_ended_stays_unverified(opened: Opened) -> None:
    never, always = (reply_with(opened.pair, gate=gate) for gate in ("never", "always"))
    for trigger, wanted, share in ((NEVER, never, 0.0), (AT_ONCE, always, 1.0)):
        found = pipesd(opened, Fixed(trigger), Budget(HALF), ASKED[:4])
        assert found.share == share
        assert found.scores == opened.counted(ASKED[:4], wanted).scores


@given(
    replies=st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20), min_size=1, max_size=20),
    balance=st.sampled_from(BALANCES),
    share=st.floats(0.01, 0.99),
)
def test_more_of_a_budget_never_makes_thresholds_stricter(
    replies: list[list[float]], balance: float, share: float
) -> None:
    curve = TriggerCurve(replies, balance, lambda _: 1)
    less, more = curve.at(share / 2), curve.at(share)
    assert less.sequence <= more.sequence
    assert less.token <= more.token
    assert curve.at(0.0) == NEVER
    assert curve.at(1.0) == AT_ONCE


def test_thresholds_spend_the_share_that_they_are_for(seen: Observations) -> None:
    for share, budget in ((0.4, Budget(0.4)), (0.1, Budget(0.1, of_passes=True))):
        for balance in (BALANCES[0], BALANCES[8], BALANCES[-1]):
            trigger = TriggerCurve(seen.confidences, balance, budget.cost).at(share)
            assert share_spent(seen.confidences, trigger, budget.cost) == pytest.approx(share, rel=0.25)


def test_the_balance_goes_from_the_product_alone_to_single_tokens_alone() -> None:
    draft = np.array(
        [0.9, 0.9, 0.9, 0.7], dtype=np.float32
    )  # the last token's surprise is 0.36, that of all of them 0.67
    product, token = balanced(0.5, 0.5 * 0.6), balanced(1.0, 0.6)
    assert product.fires(draft)
    assert not product.fires(draft[3:])
    assert not token.fires(draft)
    assert balanced(1.0, 0.3).fires(draft)


def test_a_step_is_a_line_or_eight_tokens() -> None:
    def piece(token: int) -> bytes:
        return b" \n" if token == 1 else b"word"

    state = GenerationState(np.array([7], dtype=np.int32))
    assert StepDrafter(Lines(3, 1, 3, 1), piece).propose(state, 96).ids.tolist() == [3, 1]
    assert len(StepDrafter(Lines(*[3] * 20), piece).propose(state, 96)) == STEP
    assert len(StepDrafter(Lines(*[3] * 20), piece).propose(state, 2)) == 2


def turn(tokens: int, accepted: int | None) -> Round:
    """Return a round with so many drafted tokens, of which so many were accepted; None: it was not verified."""
    verdict = None if accepted is None else Verdict(accepted, np.array([5], dtype=np.int32))
    chunk = Chunk(np.full(tokens, 3, dtype=np.int32))
    return Round(0, chunk, Decision(verdict is not None, ""), verdict, 0.0, 0.0, 0.0)


def test_a_budget_counts_drafted_tokens_or_passes_for_written_ones() -> None:
    # two of eight drafted tokens are left; with the verifier's own they are three, and one pass
    for of_passes, spent, of in ((False, 8, 10), (True, 1, 5)):
        for share, above in ((spent / of - 0.02, False), (spent / of + 0.02, True)):
            budget = Budget(share, of_passes=of_passes)
            budget.record(turn(8, 2))
            budget.record(turn(2, None))
            assert (budget.target() > share) == above


def test_a_threshold_spends_a_budget_of_tokens_or_of_passes() -> None:
    profiled, lengths = [0.1, 0.2, 0.3, 0.4], [8, 8, 2, 2]
    for of_passes, share in ((False, 0.2), (True, 0.1)):  # what the two chunks of two tokens take of twenty
        threshold = ChunkThreshold(profiled, lengths, Budget(share, of_passes=of_passes))
        assert [threshold.decide(score).offload for score in (0.45, 0.35, 0.25, 0.15)] == [True, True, False, False]


def test_tokens_that_differ_are_rejected_where_they_matter(opened: Opened) -> None:
    prompt = opened.pair.prompt_ids(ASKED[0].messages)
    run = partial(token_run, opened.drafter, opened.small.is_eog, prompt)
    own = np.array([token.id for token in reply_with(opened.pair, gate="never")(ASKED[0], 0)], dtype=np.int32)
    other = own.copy()
    other[3] = own[4]
    for reply, matters, wrong in ((own, True, []), (other, True, [3]), (other, False, [])):
        found = run(reply[:4], False, lambda *_, matters=matters: matters).verified
        assert [at for at, token in enumerate(found) if not token.whole] == wrong
        assert len(found) == 4
    assert run(own, True, lambda *_: True).verified[-1].whole  # both end their turn there
    assert not run(own[:2], True, lambda *_: True).verified[-1].whole


def test_a_token_matters_if_the_continued_reply_scores_less(opened: Opened) -> None:
    question = next(one for one in ASKED if one.case.metric != "rouge")
    prompt = opened.pair.prompt_ids(question.messages)
    own = reply_with(opened.pair, gate="always")(question, 0)
    ids = np.array([token.id for token in own], dtype=np.int32)
    assert question.score(own.summary.text) == 100.0
    assert not worse(opened, question, prompt, ids, 2, int(ids[2]))
    assert worse(opened, question, prompt, ids, 2, int(ids[0]))
    assert worse(opened, question, prompt, ids, 2, next(filter(opened.small.is_eog, range(opened.small.n_vocab))))


def test_all_rebuilt_gates_keep_one_budget_and_leave_the_rest_to_the_draft_model(
    opened: Opened, seen: Observations
) -> None:
    curve = TriggerCurve(seen.confidences, BALANCES[8], Budget(0.3).cost)
    found = {
        "pipesd": pipesd(opened, curve, Budget(0.3), ASKED),
        "confspec": confspec(opened, seen, Budget(0.3), ASKED),
        "r2r": r2r(opened, seen, Budget(0.3), ASKED),
        "auto": opened.counted(ASKED, reply_with(opened.pair, gate="auto", budget=0.3)),
    }
    shares = {name: answers.share for name, answers in found.items()}
    assert shares == {name: pytest.approx(0.3, abs=0.06) for name in found}
    passes = {name: answers.passes / answers.drafted for name, answers in found.items()}
    assert passes["pipesd"] < passes["auto"] < passes["r2r"]


def test_a_budget_is_kept_where_the_thresholds_are_off(opened: Opened) -> None:
    sure = [[0.999] * 20] * 8  # drafts of such replies end below far higher confidences than those of the pair
    for balance in (BALANCES[0], BALANCES[-1]):
        curve = TriggerCurve(sure, balance, Budget(0.3).cost)
        assert pipesd(opened, curve, Budget(0.3), ASKED).share == pytest.approx(0.3, abs=0.06)


def test_an_even_budget_takes_the_passes_that_it_allows(opened: Opened, seen: Observations) -> None:
    budget = partial(Budget, 0.05, of_passes=True)
    curve = TriggerCurve(seen.confidences, BALANCES[8], budget().cost)
    for answers in (pipesd(opened, curve, budget(), ASKED), confspec(opened, seen, budget(), ASKED)):
        assert answers.passes / answers.tokens == pytest.approx(0.05, abs=0.01)


def test_a_result_is_shown_and_plotted(tmp_path: Path) -> None:
    answers = Answers([100.0] * len(ASKED), tokens=200, drafted=200, passes=20.0, share=0.2)
    row: dict[str, Any] = answers.figures(ASKED) | {"recovered": 0.5}
    lead = {"mean": 1.25, "half_width_95": 0.5}
    rows = {name: row | {"leads": {ours: lead for ours in OURS if ours != name}} for name in (*OURS, *PUBLISHED)}
    rows["pipesd"]["thresholds"] = {"product": 0.25, "token": 0.5}
    ends = {name: {key: row[key] for key in row if key != "recovered"} for name in ("never", "always")}
    found = {"pair": "home", "cases": 3, "bounds": ends, "budgets": {"0.1": rows}}
    shown = table(found)
    assert "pipesd at 0.1: a product below 0.25 or a token below 0.5" in shown
    assert shown.count("+1.25 ±0.50") == 2 * len(rows) - 2
    assert "RelayLLM" in shown
    drawn = plot(found, tmp_path / "drawn.png")
    assert (drawn is None) == (find_spec("matplotlib") is None)

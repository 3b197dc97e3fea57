"""The papers' pictures: what is counted in them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from bench.coordgen.tasks import TASKS, recorded
from bench.papers.ablation import OURS, PAPERS, methods
from bench.papers.frontier import WholeReplies, costs
from bench.papers.switching import WIDE, Home, placed, schedules
from bench.synera.baselines import ReplyRule
from bench.synera.stalls import Method
from edgellm.engine import Context, ContextSpec, Model, ModelFile
from edgellm.layer_range import HERE, read_split
from edgellm.llm import LLM
from edgellm.spec.draft_length import CostCurve
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController
from models.pairs import PAIRS
from testkit.forced_verifier import ForcedVerifier
from testkit.network.relay import Network
from testkit.processes.paced_mesh import Pace, paced, paced_workers
from testkit.questions import ASKED as FAMILIES
from testkit.questions import questions

ASKED = questions(1)
SHOWN = ("wide", "synchronous", "progressive")


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


def test_every_technique_adds_sources_to_the_row_above() -> None:
    for rows in (PAPERS, OURS):
        every = list(rows.values())
        assert all(set(fewer) < set(more) for fewer, more in pairwise(every))


def test_methods_of_the_ablation_write_the_reply(verifier_model: Model) -> None:
    (case,) = recorded(verifier_model, "ui", 1)
    with Context(verifier_model, ContextSpec(n_ctx=1024, threads=1)) as context:
        verifier = ForcedVerifier(verifier_model, context)
        runs = methods(verifier_model, CostCurve((1, 8), (1.0, 1.1)), "ui")
        for run in runs:
            verifier.says(case.prompt, case.reply)
            run.write(verifier, verifier_model, case, (), 0.0)
    assert [len(run.whole) for run in runs] == [1] * (1 + len(PAPERS) + len(OURS))


@pytest.mark.parametrize("pair", ["home", "code"])
def test_each_task_is_a_family_of_its_pair(pair: str) -> None:
    assert set(TASKS[pair].values()) <= set(FAMILIES[pair])


@pytest.mark.parametrize("layers", [2, 7, 12])
def test_schedules_begin_wide_and_end_on_this_device(layers: int) -> None:
    found = schedules(layers)
    for name, schedule in found.items():
        every = [read_split(split) for split in (schedule.split, *schedule.following)]
        assert all(sum(len(share.layers) for share in split) == layers for split in every)
        ends_here = len(every[-1]) == 1 and every[-1][0].name == HERE
        assert ends_here == (name != "wide")
    assert found["progressive"].following[-1] == found["one move"].following[0] == placed(layers, layers)


def test_a_cold_reply_moves_and_keeps_its_text(verifier_path: Path, tmp_path: Path) -> None:
    pace = Pace(0.0, 0.001, 0.0)
    (prompt,) = (question.messages for question in ASKED if question.family == "reply")  # the longest reply
    with LLM.open("none", verifier_path, threads=1, history=False) as whole:
        own = [token.id for token in whole.reply(prompt, max_tokens=96, retrieval="off")]
    with paced(pace), paced_workers(WIDE, verifier_path, tmp_path, pace, Network(1000.0, 0.0)) as peers:
        home = Home(ModelFile.open(verifier_path), peers, pace)
        found = {name: home.write(schedules(home.layers)[name], prompt, "off") for name in SHOWN}
        copied = home.write(schedules(home.layers)["naive"], prompt, "context,reuse")
    assert {name: reply.tokens for name, reply in found.items()} == dict.fromkeys(SHOWN, own)
    assert copied.tokens == own
    assert found["wide"].moves == []
    assert len(found["synchronous"].moves) == 1
    assert found["progressive"].moves == sorted(found["progressive"].moves)

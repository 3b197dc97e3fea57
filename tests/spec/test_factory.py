"""From what is asked for to a gate, and that the gate's share is the budget whatever the scores do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.spec.gates.factory import AUTO, GateChoice, best_gate, choose, needs_profile
from edgellm.spec.gates.offload_policy import JUDGED, NAMES, Linear, Policy, signals
from edgellm.spec.gates.profile import ExitPoint, Profile
from edgellm.spec.gates.rules import BudgetController, BudgetGate, ImportanceGate, NeverGate, RandomGate
from edgellm.spec.params import GATES, ReplyOptions
from edgellm.spec.protocols import Gate
from edgellm.spec.types import Chunk
from tests.spec.fakes import at

RNG = np.random.default_rng(3)
CONFIDENCE = tuple(RNG.beta(5, 1, 100).tolist())
HOPE, SCORES = Linear((0.0,) * (len(JUDGED) + 1), 1.0), tuple(RNG.uniform(0, 0.5, 100).tolist())
PROFILE = Profile(
    draft_hash="a", verifier_hash="b", gamma=4, prompts=50, chunks=300, c_th=0.8, alpha=0.8,
    acceptance=(0.8, 0.7, 0.6, 0.5), layers=(1,), confidence=CONFIDENCE,
    importance=tuple(RNG.uniform(0.1, 0.4, 100).tolist()),
    tokens=CONFIDENCE, perplexities=tuple(RNG.uniform(1, 2, 50).tolist()),
    policies=(Policy(0.2, Linear((1.0, *[0.0] * (len(JUDGED) - 1)), -1.0), HOPE, SCORES),),
    evidence={"gate synera at 0.2": 0.6, "gate worth at 0.2": 0.7, "gate random at 0.2": 0.2,
    "gate confidence at 0.4": 0.5}, draft_seconds=0.01, verify_seconds=0.05, batch_seconds=(0.01, 0.012, 0.02, 0.03),
)  # fmt: skip


def drafted(rng: np.random.Generator, ahead: int = 0) -> Chunk:
    """A chunk as unsure as profiled ones are, or a little more so."""
    return Chunk(
        np.ones(4, np.int32), rng.beta(4, 1, 4).astype(np.float32), rng.uniform(0, 1, 4).astype(np.float32),
        importance=rng.uniform(0.1, 0.3, 4 if not ahead else 0).astype(np.float32), ahead=ahead,
    )  # fmt: skip


def chosen(gate: str, budget: float | None, controller: BudgetController | None = None) -> GateChoice:
    options = ReplyOptions(gate=gate, budget=budget)
    return choose(options, 1, profile=PROFILE, controller=controller or BudgetController())


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("gate", sorted(set(GATES) - {"always", "never"}))
def test_every_gate_keeps_its_budget_on_chunks_that_were_not_profiled(gate: str, budget: float) -> None:
    controller, rng = BudgetController(), np.random.default_rng(5)
    for _ in range(40):  # replies
        choice = chosen(gate, budget, controller)
        for place in range(8):
            choice.gate.decide(at(5 * place), drafted(rng, ahead=4 * (place % 3 == 1)))
    assert controller.share == pytest.approx(budget, abs=0.03)


def test_auto_takes_the_best_evidence_and_says_it() -> None:
    assert best_gate(PROFILE, 0.25)[0] == "worth"
    assert "70%" in best_gate(PROFILE, 0.25)[1]
    assert best_gate(PROFILE, 0.9)[0] == "confidence"
    assert best_gate(replace(PROFILE, evidence={}), 0.2)[0] == AUTO[0]
    assert chosen("auto", 0.2).layers == ()  # which weighs no importance
    assert chosen("synera", 0.2).layers == (1,)
    assert chosen("confidence", 0.2).layers == ()


def test_what_needs_no_profile() -> None:
    assert not needs_profile(ReplyOptions())
    assert not needs_profile(ReplyOptions(budget=1.0, gate="synera"))
    assert not needs_profile(ReplyOptions(budget=0.0))
    assert not needs_profile(ReplyOptions(budget=0.3, gate="random"))
    assert needs_profile(ReplyOptions(budget=0.3))


def test_a_gate_of_your_own_is_counted() -> None:
    controller = BudgetController()
    own = choose(ReplyOptions(gate=NeverGate()), 1, profile=None, controller=controller)
    own.gate.decide(at(0), drafted(RNG))
    assert (controller.decided, controller.share) == (1, 0.0)


def test_the_tail_counts_too_and_is_made_up_for() -> None:
    controller, rng = BudgetController(), np.random.default_rng(5)
    for _ in range(60):
        choice = chosen("random", 0.3, controller)
        for place in range(10):
            assert not (choice.gate.decide(at(place, 10), drafted(rng)).offload and place >= 8)
    assert controller.share == pytest.approx(0.3, abs=0.03)


def test_an_overspent_budget_closes_any_gate_and_an_unspent_one_opens_it() -> None:
    for offloaded, wanted in ((100, False), (0, True)):
        controller = BudgetController(decided=100, offloaded=offloaded)
        gate = BudgetGate(lambda share: RandomGate(share, 1), 0.6, controller)
        assert gate.decide(at(0), drafted(RNG)).offload == wanted


def test_importance_that_was_not_measured_counts_as_the_usual_one() -> None:
    chunk = drafted(RNG, ahead=4)
    assert not ImportanceGate(0.2, 1).judge(chunk, 0).offload
    assert ImportanceGate(0.2, 1, usual_importance=0.3).judge(chunk, 0).offload
    importance = NAMES.index("mean importance")
    assert signals(chunk, 0, 0.3)[importance] == 0.3
    half = replace(drafted(RNG), ahead=2)
    assert signals(half, 0, 0.3)[importance] == pytest.approx((0.6 + half.importance[2:].sum()) / 4)


def test_where_an_early_exit_pays() -> None:
    points = ExitPoint(5, 0.5, 0.999, 0.7, 1.0), ExitPoint(6, 0.6, 0.999, 0.8, 1.0), ExitPoint(7, 0.9, 0.9, 0.5, 1.0)
    assert replace(PROFILE, exits=points).best_exit()[0] == 5
    assert replace(PROFILE, exits=points[2:]).best_exit()[0] is None  # fast, and wrong
    assert PROFILE.best_exit() == (None, "early exit was not measured")


def test_a_gate_of_ones_own_names_the_layers_that_it_needs() -> None:
    class Own(NeverGate):
        layers = (1, 2)

    def layers(gate: Gate) -> tuple[int, ...]:
        return choose(ReplyOptions(gate=gate), 0, profile=None, controller=BudgetController()).layers

    assert layers(Own()) == (1, 2)
    assert layers(NeverGate()) == ()

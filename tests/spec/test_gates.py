"""Gates: the paper's equation, draws that can be repeated, and a share that is the budget whatever the scores do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.spec.gates import profile as profiles
from edgellm.spec.gates import rules
from edgellm.spec.gates.fitting import Chunks, alpha_of, auc, build, evidence, fit, fit_policy, fit_rejection, follow
from edgellm.spec.gates.profile import NAMES, TOKENS, FittedJudge, Logistic, Policy, Profile, ProfileTerms
from edgellm.spec.gates.rules import HORIZON, BudgetController, BudgetGate, NeverGate, choose, judge_at, p_conf
from edgellm.spec.gates.synera import by_importance
from edgellm.spec.params import GATES, ReplyOptions
from edgellm.spec.protocols import GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import Chunk, Drafted
from tests.spec.fakes import FakeDrafter, FakeVerifier, at
from tests.spec.running import BIG, PROMPT, SMALL, going

RNG = np.random.default_rng(3)
CONFIDENCE, IMPORTANCE = tuple(RNG.beta(5, 1, 100).tolist()), tuple(RNG.uniform(0.1, 0.4, 100).tolist())


def logistic(first: float, n: int, bias: float) -> Logistic:
    """Judges by the first signal alone, which it takes as it is but for its logarithm."""
    return Logistic((0.0,) * n, (1.0,) * n, (first, *[0.0] * (n - 1)), bias)


def profile(scores: object = None) -> Profile:
    scores = tuple(RNG.uniform(0, 0.5, 100).tolist()) if scores is None else tuple(np.asarray(scores).tolist())
    return Profile(
        ProfileTerms("a", "b", 4, (1,), 50, 300),
        profiles.UnverifiedReplies(CONFIDENCE, IMPORTANCE, CONFIDENCE, (1.0, 2.0)),
        0.8, 0.8, (0.8, 0.7, 0.6, 0.5), logistic(1.0, len(NAMES), -1.0),
        (Policy(0.2, logistic(0.0, len(NAMES) + 1, 1.0), scores),),
        {"gate synera at 0.2": 0.6, "gate worth at 0.2": 0.7, "gate random at 0.2": 0.2, "gate confidence at 0.4": 0.5},
    )  # fmt: skip


PROFILE = profile()


def drafted(rng: np.random.Generator, ahead: int = 0) -> Chunk:
    """A chunk as unsure as profiled ones are, or a little more so."""
    confidence, margins = rng.beta(4, 1, 4).astype(np.float32), rng.uniform(0, 1, 4).tolist()
    importance = rng.uniform(0.1, 0.3, 4).tolist() if not ahead else [None] * 4
    return Chunk(np.ones(4, np.int32), confidence, drafted=tuple(map(Drafted, margins, importance)), ahead=ahead)


def of(*confidence: float) -> Chunk:
    values = np.array(confidence, dtype=np.float32)
    return Chunk(np.ones(len(values), dtype=np.int32), values)


def chosen(gate: str, budget: float | None, controller: BudgetController | None = None) -> rules.GateChoice:
    options = ReplyOptions(gate=gate, budget=budget)
    return choose(options, 1, profile=PROFILE, controller=controller or BudgetController())


@pytest.mark.parametrize(
    ("c", "c_th", "expected"),
    [(0.5, 0.7, 1.0), (0.7, 0.7, 1.0), (0.85, 0.7, 0.5), (1.0, 0.7, 1 / (1 + math.exp(5))), (1.0 + 1e-7, 1.0, 1.0),
     (0.95, 0.8, 1 / (1 + math.exp(2.5)))],
)  # fmt: skip
def test_p_conf_is_the_papers_equation(c: float, c_th: float, expected: float) -> None:
    assert p_conf(c, c_th) == pytest.approx(expected)


def test_the_share_of_chunks_offloaded_is_p_conf_and_the_draws_can_be_repeated() -> None:
    def offloaded(seed: int) -> list[bool]:
        gate = rules.Rule(lambda confidence, _: p_conf(confidence, 0.6), seed)
        return [gate.judge(of(0.75, 0.85, 0.95), written).offload for written in range(4000)]

    assert np.mean(offloaded(3)) == pytest.approx(p_conf(0.85, 0.6), abs=0.03)
    assert offloaded(1) == offloaded(1) != offloaded(2)


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("gate", sorted(set(GATES) - {"always", "never"}))
def test_every_gate_keeps_its_budget_on_chunks_that_were_not_profiled(gate: str, budget: float) -> None:
    """Also in the tail of a reply, which is never verified."""
    controller, rng = BudgetController(), np.random.default_rng(5)
    for _ in range(60):  # replies
        choice = chosen(gate, budget, controller)
        for place in range(10):
            decision = choice.gate.decide(at(place, 10), drafted(rng, ahead=4 * (place % 3 == 1)))
            controller.record(decision.offload)
            assert not (decision.offload and place >= 8)
    assert controller.share == pytest.approx(budget, abs=0.03)


def test_auto_is_the_fitted_gate_and_says_its_evidence() -> None:
    assert "with 20% of chunks verified, 70% of the profiled" in rules.evidence_of(PROFILE, 0.25)
    assert [chosen(gate, 0.2).gate.layers for gate in ("auto", "synera", "confidence")] == [(), (1,), ()]


@pytest.mark.parametrize(
    ("options", "needs"),
    [({}, False), ({"budget": 1.0, "gate": "synera"}, False), ({"budget": 0.0}, False),
     ({"budget": 0.3, "gate": "random"}, False), ({"budget": 0.3}, True)],
)  # fmt: skip
def test_what_needs_a_profile(options: dict[str, object], needs: bool) -> None:
    assert ReplyOptions(**options).needs_profile == needs  # type: ignore[arg-type]


def test_a_gate_of_your_own_is_counted_and_names_its_layers() -> None:
    class Own(NeverGate):
        layers = (1, 2)

    controller = BudgetController()
    own = choose(ReplyOptions(gate=Own()), 1, profile=None, controller=controller)
    assert (own.gate.layers, own.controller) == ((1, 2), controller)
    stats = Summary()
    stats.count_with(controller)
    list(going(GenerationState(PROMPT), FakeDrafter(SMALL), FakeVerifier(BIG), own.gate, stats=stats))
    assert controller.decided == stats.chunks > 0
    assert controller.share == stats.share_offloaded == 0.0


def test_what_is_owed_is_paid_back() -> None:
    controller = BudgetController(decided=100, offloaded=10)
    assert controller.share == 0.1
    assert controller.target_share(0.2) == pytest.approx(0.2 + 10 / HORIZON)
    for offloaded, wanted in ((100, 0.0), (0, 1.0)):
        controller = BudgetController(100, offloaded)
        assert controller.target_share(0.6) == wanted
        gate = BudgetGate(
            judge_at(lambda share: rules.Rule(rules.at_random(None, share), 1), controller), 0.6, controller
        )
        assert gate.decide(at(0), drafted(RNG)).offload == wanted


def test_importance_that_was_not_measured_counts_as_the_usual_one() -> None:
    chunk = drafted(RNG, ahead=4)
    rule = by_importance(PROFILE, 0.5)
    assert not rules.Rule(rule, 1).judge(chunk, 0).offload
    assert rules.Rule(rule, 1, usual_importance=0.5).judge(chunk, 0).offload


def spend(profiled: np.ndarray, scores: np.ndarray, budget: float) -> list[bool]:
    """Return which chunks of these scores, from 0.5 to 0.9, the fitted gate offloads."""
    made, controller, found = profile(profiled), BudgetController(), []
    hope = replace(made.policies[0].continuation, bias=30.0)
    made = replace(made, rejected=replace(made.rejected, bias=0.0), policies=(Policy(0.2, hope, tuple(profiled)),))
    for place, score in enumerate(scores.tolist()):
        doubt = score / (1.0 - score) - 1.0  # The gate takes its logarithm.
        gate = BudgetGate(FittedJudge(made, budget, place), budget, controller)
        found.append(gate.decide(at(0), of(math.exp(-doubt))).offload)
        controller.record(found[-1])
    return found


@given(budget=st.floats(0.05, 0.95), seed=st.integers(0, 99), drift=st.floats(-0.05, 0.05))
@settings(max_examples=20)
def test_the_share_spent_is_the_budget_even_where_scores_drift(budget: float, seed: int, drift: float) -> None:
    rng = np.random.default_rng(seed)
    taken = spend(rng.uniform(0.55, 0.8, 200), rng.uniform(0.55, 0.8, 800) + drift, budget)
    assert np.mean(taken) == pytest.approx(budget, abs=0.03)


def test_the_best_chunks_are_the_ones_taken_and_equal_ones_are_shared_out() -> None:
    rng = np.random.default_rng(1)
    scores = rng.uniform(0.5, 0.8, 2000)
    taken = np.array(spend(rng.uniform(0.5, 0.8, 500), scores, 0.2))
    best = scores >= np.quantile(scores, 0.8)
    assert (taken & best).sum() / best.sum() > 0.85
    assert np.mean(spend(np.full(50, 0.6), np.full(1000, 0.6), 0.3)) == pytest.approx(0.3, abs=0.02)


# --- the fit of a profile ---------------------------------------------------------------------------------------------


DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(4000, 4)) * (1.0, 5.0, 0.1, 1.0) + (0.0, 3.0, 1.0, 0.0)
EITHER = ((X[:, 0] > 0) ^ (X[:, 3] > 0.0)).astype(np.float64)  # no straight law tells it
HARD, EASY = 7, 8


def loss(scores: np.ndarray, truth: np.ndarray) -> float:
    return float(-np.log(np.where(truth > 0.5, scores, 1.0 - scores)).mean())


def test_it_finds_the_law() -> None:
    chance = 1.0 / (1.0 + np.exp(-(1.5 * X[:, 0] - 0.2 * X[:, 1])))
    truth = (DRAWS.random(4000) < chance).astype(float)
    for pairs in (False, True):
        assert np.abs(fit(X, truth, pairs=pairs).scores(X) - chance).mean() < 0.06
    worth = np.where(X[:, 0] > 0, 0.4, 0.1)  # shares are predicted as shares
    assert fit(X, worth).scores(X).mean() == pytest.approx(0.25, abs=0.01)


def test_pairs_find_what_no_straight_law_can() -> None:
    seen, new = slice(0, 3000), slice(3000, None)
    assert loss(fit(X[seen], EITHER[seen]).scores(X[new]), EITHER[new]) > 0.6
    assert loss(fit(X[seen], EITHER[seen], pairs=True).scores(X[new]), EITHER[new]) < 0.3


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_one_kind_alone_and_dead_signals_do_no_harm(worth: float, pairs: bool) -> None:
    x = np.column_stack((np.full(50, 3.0), np.arange(50.0)))
    scores = fit(x, np.full(50, worth), pairs=pairs).scores(np.vstack((x, [[1e9, -1e9]])))
    assert np.isfinite(scores).all()
    assert scores[:50].mean() == pytest.approx(worth, abs=0.05)


@pytest.mark.parametrize(
    ("scores", "truth", "expected"),
    [([4, 3, 2, 1], "1100", 1.0), ([1, 2, 3, 4], "1100", 0.0), ([0] * 4, "1100", 0.5), ([2, 1, 1, 0], "1100", 0.875),
     ([0, 0], "11", math.nan)],
)  # fmt: skip
def test_auc(scores: list[float], truth: str, expected: float) -> None:
    found = auc(np.array(scores, dtype=np.float64), np.array([one == "1" for one in truth]))
    assert found == pytest.approx(expected, nan_ok=True)


def chunks(replies: int, told: bool) -> Chunks:
    """Replies of ten chunks; whether one is rejected follows from two signals together, or from nothing."""
    rng = np.random.default_rng(3)
    signals = rng.normal(size=(10 * replies, len(NAMES)))
    signals[:, TOKENS] = 2.0
    wrong = (signals[:, 3] > 0) & (signals[:, 4] > 0) if told else rng.random(len(signals)) < 0.2
    return Chunks(signals, np.where(wrong, 0, 2), np.repeat(np.arange(replies), 10))


def test_what_is_said_of_unseen_replies_was_said_unseen() -> None:
    """A predictor that learned noise by heart would call it certain."""
    noise = chunks(300, told=False)
    _, unseen = fit_rejection(noise)
    assert unseen.std() < 0.1
    assert 0.4 < evidence(noise, unseen)["auc rejected"] < 0.6


def test_a_policy_spends_its_share_on_what_saves_replies() -> None:
    known = chunks(200, told=True)
    _, unseen = fit_rejection(known)
    verified = follow(known, unseen, fit_policy(known, unseen, 0.2))
    assert verified.mean() == pytest.approx(0.2, abs=0.01)
    right = ~np.bincount(known.reply[known.wrong & ~verified], minlength=200).astype(bool)
    at_random = np.random.default_rng(0).permutation(verified)
    right_at_random = ~np.bincount(known.reply[known.wrong & ~at_random], minlength=200).astype(bool)
    assert right.mean() > 0.3 > 0.2 > right_at_random.mean()


@pytest.mark.parametrize(("tokens", "alpha"), [((1 - 0.7**5) / (1 - 0.7), 0.7), (5.0, 1.0), (1.0, 0.0)])
def test_alpha_is_the_papers(tokens: float, alpha: float) -> None:
    assert alpha_of(tokens, 4) == pytest.approx(alpha, abs=1e-9)


def test_too_little_is_said() -> None:
    with pytest.raises(InvalidOption, match="more prompts"):
        build([], ProfileTerms("a", "b", 4))

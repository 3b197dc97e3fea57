"""Profiling the real pair, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Message, Model
from edgellm.errors import InvalidOption, ProfileUnusable
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.fitted import LearnedGate
from edgellm.spec.gates.fitting import alpha_of, build
from edgellm.spec.gates.offload_policy import NAMES
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.profiler import PairProfiler, Run
from edgellm.spec.gates.rules import (
    BudgetController,
    CountingGate,
    ImportanceGate,
    Rule,
    SyneraGate,
    p_conf,
)
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.types import Ids
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from models.home.corpus import held_out
from models.home.families import FAMILIES

GAMMA, MOST, LAYER = 4, 40, 2


def prompts(model: Model, seed: int, count: int) -> list[Ids]:
    cases = [case for family in FAMILIES for case in held_out(family, count, seed=seed)]
    return [model.chat_prompt([Message(t.role, t.text) for t in case.prompt]) for case in cases]


@pytest.fixture(scope="module")
def draft_model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    """In f32, where the shape of a batch does not decide what comes next."""
    with Model.load(f32_pair[0]) as model:
        yield model


@pytest.fixture(scope="module")
def verifier_model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[1]) as model:
        yield model


@pytest.fixture(scope="module")
def drafter(draft_model: Model) -> Iterator[ModelDrafter]:
    capture = Capture(attention=(LAYER,))
    own = ModelDrafter(
        draft_model, Context(draft_model, ContextSpec(n_ctx=1024, threads=1), capture=capture), layers=(LAYER,)
    )
    yield own
    own.close()


@pytest.fixture(scope="module")
def watcher(draft_model: Model, verifier_model: Model, drafter: ModelDrafter) -> Iterator[PairProfiler]:
    pool = ContextPool(lambda: Context(verifier_model, ContextSpec(n_ctx=1024, threads=1)))
    verifier = LocalVerifier(verifier_model, pool, 1024)
    session = verifier.open(GenerationState())
    yield PairProfiler(drafter, session, draft_model.is_eog, GenerationLimits(MOST, gamma=GAMMA))
    session.close()
    verifier.close()


@pytest.fixture(scope="module")
def runs(draft_model: Model, watcher: PairProfiler) -> list[Run]:
    return [watcher.run(prompt) for prompt in prompts(draft_model, seed=31, count=2)]


@pytest.fixture(scope="module")
def profile(runs: list[Run]) -> Profile:
    return build(runs, draft_hash="a", verifier_hash="b", gamma=GAMMA, layers=(LAYER,))


def test_what_was_seen_is_sound(runs: list[Run]) -> None:
    alone = [seen for run in runs for seen in run.alone]
    assert len(alone) > 50
    assert any(seen.importance > 0.0 for seen in alone)
    so_far = NAMES.index("doubt so far")
    for run in runs:
        for chunks in (run.verified, run.alone):
            doubts = [seen.signals[so_far] for seen in chunks]
            assert doubts[0] == 0.0
            assert doubts == sorted(doubts)


def test_a_reply_is_written_again_only_where_another_threshold_changes_its_drafts(
    draft_model: Model, watcher: PairProfiler
) -> None:
    again = kept = 0
    for prompt in prompts(draft_model, seed=32, count=1):
        record = watcher.record(prompt)
        assert record.lookup is not None
        low, high = (watcher.with_lookup(prompt, record, below).lookup for below in (0.5, 0.95))
        assert low is not None
        assert high is not None
        same = [(one.accepted, one.tokens) for one in low.chunks] == [(one.accepted, one.tokens) for one in high.chunks]
        if low.holds(0.95):
            kept += 1
            assert same
            assert all(np.allclose(a.signals, b.signals) for a, b in zip(low.chunks, high.chunks, strict=True))
            assert watcher.with_lookup(prompt, replace(record, lookup=low), 0.95).lookup is low
        else:
            again += 1
    assert again > 0 < kept


def test_the_profile_tells_what_was_seen(profile: Profile, runs: list[Run]) -> None:
    verified = [seen for run in runs for seen in run.verified]
    assert 0.0 < profile.c_th <= 1.0
    assert 0.0 <= profile.alpha <= 1.0
    assert list(profile.acceptance) == sorted(profile.acceptance, reverse=True)
    assert profile.acceptance[0] == pytest.approx(np.mean([seen.accepted > 0 for seen in verified]))
    assert profile.evidence["auc rejected"] > 0.7
    assert profile.draft_seconds > 0 < profile.verify_seconds


def test_it_comes_back_from_disk(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    path.write_text(path.read_text().replace('"version": 6', '"version": 0'))
    with pytest.raises(ProfileUnusable, match="edgellm profile"):
        Profile.load(path)
    for rubbish in (
        "",
        "7",
        "[]",
        "{}",
        '{"version": 6}',
        '{"version": 7}',
        '{"version": 6, "policies": 3, "exits": []}',
    ):
        path.write_text(rubbish)
        with pytest.raises(ProfileUnusable):
            Profile.load(path)
    with pytest.raises(ProfileUnusable):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize("budget", [0.1, 0.2, 0.4])
def test_thresholds_give_the_budget_as_the_whole_gates_share(profile: Profile, budget: float) -> None:
    def share(gate: Rule) -> float:
        from edgellm.spec.types import Chunk

        taken = [
            gate.judge(
                Chunk(
                    np.zeros(1, np.int32),
                    np.array([c], np.float32),
                    np.zeros(1, np.float32),
                    importance=np.array([i], np.float32),
                ),
                at,
            )
            for at in range(20)
            for c, i in zip(profile.confidence, profile.importance, strict=True)
        ]
        return float(np.mean([decision.offload for decision in taken]))

    reachable = np.mean([p_conf(c, profile.c_th) for c in profile.confidence])
    gate = SyneraGate(profile.c_th, profile.i_th(budget), seed=3)
    assert share(gate) == pytest.approx(min(budget, reachable), abs=0.03)
    assert share(ImportanceGate(profile.i_th(budget, coarse=False), seed=3)) == pytest.approx(budget, abs=0.03)


@pytest.mark.parametrize("budget", [0.0, 0.2, 0.5, 1.0])
def test_the_budget_is_spent_on_prompts_that_were_not_profiled(
    profile: Profile, drafter: ModelDrafter, draft_model: Model, budget: float
) -> None:
    controller = BudgetController()
    for prompt in prompts(draft_model, seed=47, count=3):
        gate = LearnedGate(profile, budget, controller, seed=1)  # one for each reply
        state = GenerationState(prompt, limits=GenerationLimits(MOST))
        while state.tokens_left:
            chunk = drafter.propose(state, min(GAMMA, state.tokens_left))
            gate.decide(state, chunk)
            for token in chunk.ids.tolist():
                state.append(token)
            if draft_model.is_eog(int(state.ids[-1])):
                break
    assert controller.decided > 80
    assert controller.share == pytest.approx(budget, abs=0.03)


def test_alpha_is_the_papers() -> None:
    assert alpha_of((1 - 0.7**5) / (1 - 0.7), 4) == pytest.approx(0.7)
    assert alpha_of(5.0, 4) == pytest.approx(1.0)
    assert alpha_of(1.0, 4) == pytest.approx(0.0, abs=1e-9)


def test_too_little_is_said() -> None:
    with pytest.raises(InvalidOption, match="more prompts"):
        build([], draft_hash="a", verifier_hash="b", gamma=4)


def test_a_gate_is_counted() -> None:
    controller = BudgetController()
    from edgellm.spec.gates.rules import AlwaysGate
    from edgellm.spec.types import Chunk

    CountingGate(AlwaysGate(), controller).decide(GenerationState(), Chunk())
    assert (controller.decided, controller.offloaded) == (1, 1)

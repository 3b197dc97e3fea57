"""Profiling the real pair, and what becomes of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Message, Model
from edgellm.errors import ProfileUnusable
from edgellm.llm.profiling import PairProfiler
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.fitting import Run, build
from edgellm.spec.gates.profile import Profile, ProfileTerms
from edgellm.spec.gates.rules import Chances, p_conf
from edgellm.spec.gates.synera import by_both, by_importance
from edgellm.spec.protocols import GenerationLimits
from edgellm.spec.types import Ids
from edgellm.verifier.in_process import LocalVerifier
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
    verifier = LocalVerifier(verifier_model, ContextSpec(n_ctx=1024, threads=1))
    yield PairProfiler(drafter, verifier, draft_model, GenerationLimits(MOST, gamma=GAMMA))
    verifier.close()


@pytest.fixture(scope="module")
def runs(draft_model: Model, watcher: PairProfiler) -> list[Run]:
    return [watcher.record(prompt, context_lookup=False) for prompt in prompts(draft_model, seed=31, count=2)]


@pytest.fixture(scope="module")
def profile(runs: list[Run]) -> Profile:
    return build(runs, ProfileTerms("a", "b", GAMMA, (LAYER,)))


def test_the_profile_tells_what_was_seen(profile: Profile, runs: list[Run]) -> None:
    verified = [seen for run in runs for seen in run.verified]
    assert 0.0 < profile.c_th <= 1.0
    assert 0.0 <= profile.alpha <= 1.0
    assert list(profile.acceptance) == sorted(profile.acceptance, reverse=True)
    assert profile.acceptance[0] == pytest.approx(np.mean([seen.accepted > 0 for seen in verified]))
    assert profile.evidence["auc rejected"] > 0.7
    assert profile.draft_seconds > 0 < profile.verify_seconds
    assert len(profile.alone.confidence) == len(profile.alone.importance) > 50
    assert max(profile.alone.importance) > 0.0


def test_replies_are_written_again_only_if_thresholds_change_drafts(draft_model: Model, watcher: PairProfiler) -> None:
    again = kept = 0
    for prompt in prompts(draft_model, seed=32, count=1):
        run = watcher.record(prompt)
        found = watcher.with_lookup(prompt, run, 0.7)
        if run.doubt >= 0.7:
            kept += 1
            assert found is run
        else:
            again += 1
            assert found.with_lookup
            assert found.with_lookup != run.verified
    assert again > 0 < kept


def test_it_comes_back_from_disk(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    text = path.read_text()
    for rubbish in (
        text.replace('"version": 9', '"version": 0'), text.replace('"weights": [', '"weights": [0.5, ', 1),
        "", "7", "[]", "{}", '{"version": 9}', '{"version": 9, "policies": 3, "exits": []}',
    ):  # fmt: skip
        path.write_text(rubbish)
        with pytest.raises(ProfileUnusable, match="edgellm profile"):
            Profile.load(path)
    with pytest.raises(ProfileUnusable):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize("budget", [0.1, 0.4])
def test_thresholds_give_the_budget_as_the_whole_gates_share(profile: Profile, budget: float) -> None:
    def share(chances: Chances) -> float:
        return float(chances(np.array(profile.alone.confidence), np.array(profile.alone.importance)).mean())

    reachable = np.mean([p_conf(c, profile.c_th) for c in profile.alone.confidence])
    assert share(by_both(profile, budget)) == pytest.approx(min(budget, reachable), abs=0.03)
    assert share(by_importance(profile, budget)) == pytest.approx(budget, abs=0.03)

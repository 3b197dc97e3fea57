"""Profiling the real pair, and what becomes of it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.errors import ProfileUnusable
from edgellm.llm.profiling import PairProfiler
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.fitting import Run, build
from edgellm.spec.gates.profile import Profile, ProfileTerms
from edgellm.spec.gates.rules import Chances, p_conf
from edgellm.spec.gates.synera import by_both, by_importance
from edgellm.spec.protocols import GenerationLimits
from edgellm.verifier.in_process import LocalVerifier
from tests.spec.real import prompts

GAMMA, MOST, LAYER = 4, 40, 2


@pytest.fixture(scope="module")
def watcher(f32_pair: tuple[Path, Path]) -> Iterator[tuple[PairProfiler, Model]]:
    """Yield a profiler of the pair, and its draft model: in f32, where a batch's shape decides nothing."""
    spec = ContextSpec(n_ctx=1024, threads=1)
    with (
        Model.load(f32_pair[0]) as draft,
        Model.load(f32_pair[1]) as big,
        closing(ModelDrafter(draft, Context(draft, spec, capture=Capture(attention=(LAYER,))), (LAYER,))) as drafter,
        closing(LocalVerifier(big, spec)) as verifier,
    ):
        yield PairProfiler(drafter, verifier, draft, GenerationLimits(MOST, gamma=GAMMA)), draft


@pytest.fixture(scope="module")
def runs(watcher: tuple[PairProfiler, Model]) -> list[Run]:
    profiler, draft = watcher
    return [profiler.record(draft.chat_prompt(messages), context_lookup=False) for messages in prompts(31, 2)]


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
    assert len(profile.alone.confidence) == len(profile.alone.importance) > 50
    assert max(profile.alone.importance) > 0.0


def test_replies_are_written_again_only_if_thresholds_change_drafts(watcher: tuple[PairProfiler, Model]) -> None:
    profiler, draft = watcher
    again = kept = 0
    for messages in prompts(32):
        prompt = draft.chat_prompt(messages)
        run = profiler.record(prompt)
        found = profiler.with_lookup(prompt, run, 0.7)
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
        text.replace('"version": 10', '"version": 0'), text.replace('"weights": [', '"weights": [0.5, ', 1),
        "", "7", "[]", "{}", '{"version": 10}', '{"version": 10, "policies": 3, "exits": []}',
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

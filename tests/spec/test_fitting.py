"""The fit of a profile finds what decides, and says little where there is nothing to find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.spec.gates.fitting import Chunks, alpha_of, auc, build, evidence, fit, fit_policy, fit_rejection, follow
from edgellm.spec.gates.profile import NAMES, TOKENS, ProfileTerms, WordWeights
from edgellm.spec.gates.prompt_difficulty import difficulty_of, fit_difficulty

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4000, 4)) * (1.0, 5.0, 0.1, 1.0) + (0.0, 3.0, 1.0, 0.0)
EITHER = ((X[:, 0] > 0) ^ (X[:, 3] > 0.0)).astype(np.float64)  # no straight law tells it
HARD, EASY = 7, 8


def loss(scores: np.ndarray, truth: np.ndarray) -> float:
    return float(-np.log(np.where(truth > 0.5, scores, 1.0 - scores)).mean())


def test_it_finds_the_law() -> None:
    chance = 1.0 / (1.0 + np.exp(-(1.5 * X[:, 0] - 0.2 * X[:, 1])))
    truth = (RNG.random(4000) < chance).astype(float)
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


def prompts(n: int) -> tuple[list[list[int]], np.ndarray]:
    """Return prompts of a dozen tokens: one token makes a reply go wrong four times, another never."""
    found = [[*RNG.integers(20, 60, 10).tolist(), HARD if number % 2 else EASY] for number in range(n)]
    return found, np.array([4.0 if HARD in prompt else 0.0 for prompt in found])


def test_the_word_that_predicts_corrections_is_found_and_noise_is_not_memorised() -> None:
    seen, wrong = prompts(400)
    fitted, unseen = fit_difficulty(seen, wrong)
    assert np.corrcoef(unseen, wrong)[0, 1] > 0.95
    new, truth = prompts(100)
    estimated = [difficulty_of(fitted, np.array(prompt, dtype=np.int32)) for prompt in new]
    assert np.corrcoef(estimated, truth)[0, 1] > 0.95
    _, unseen = fit_difficulty(seen, RNG.permutation(wrong))
    assert np.corrcoef(unseen, wrong)[0, 1] < 0.2


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=3, max_size=12), st.integers(0, 999))
def test_each_prompt_is_predicted_by_the_others_alone(words: list[list[int]], seed: int) -> None:
    """The closed form gives the same as fitting once for each reply that is left out."""
    wrong = np.random.default_rng(seed).integers(0, 5, len(words)).astype(np.float64)
    _, unseen = fit_difficulty(words, wrong)
    tokens = sorted({t for own in words for t in own if sum(t in other for other in words) > 1})
    has = np.array([[(t in own) / np.sqrt(max(1, len(set(own)))) for t in tokens] for own in words])
    has = has.reshape(len(words), len(tokens))
    for out in range(len(words)):
        rest = np.arange(len(words)) != out
        gram = has[rest].T @ has[rest] + np.eye(len(tokens))
        weights = np.linalg.solve(gram, has[rest].T @ (wrong[rest] - wrong.mean()))
        assert unseen[out] == pytest.approx(wrong.mean() + has[out] @ weights, abs=1e-6)


def test_no_estimate_is_beyond_those_of_the_profiled_prompts_and_an_unknown_prompt_is_as_usual() -> None:
    loud = WordWeights(1.0, 0.5, 4.0, (HARD,), (99.0,))
    assert [difficulty_of(loud, np.array(prompt, dtype=np.int32)) for prompt in ([HARD], [EASY], [])] == [4.0, 1.0, 1.0]
    fitted, unseen = fit_difficulty([(), (), ()], np.array([1.0, 0.0, 2.0]))
    assert (fitted.usual, unseen.tolist()) == (1.0, [1.0, 1.0, 1.0])

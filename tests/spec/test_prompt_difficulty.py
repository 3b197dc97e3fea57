"""Words that predict corrections are found, and a prediction never knows its own reply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.spec.gates.fitted import LearnedGate
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.prompt_difficulty import PromptDifficulty, fit_difficulty
from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk

MODELS = Path(__file__).parents[2] / "models"
RNG = np.random.default_rng(5)
HARD, EASY = 7, 8


def prompts(n: int) -> tuple[list[list[int]], np.ndarray]:
    """Return prompts of a dozen tokens: one token makes a reply go wrong four times, another never."""
    found = [[*RNG.integers(20, 60, 10).tolist(), HARD if number % 2 else EASY] for number in range(n)]
    return found, np.array([4.0 if HARD in prompt else 0.0 for prompt in found])


def test_the_word_that_predicts_corrections_is_found() -> None:
    seen, wrong = prompts(400)
    fitted, unseen = fit_difficulty(seen, wrong)
    assert np.corrcoef(unseen, wrong)[0, 1] > 0.95
    new, truth = prompts(100)
    estimated = [fitted.of(np.array(prompt, dtype=np.int32)) for prompt in new]
    assert np.corrcoef(estimated, truth)[0, 1] > 0.95
    assert fitted.of(np.array([HARD, 999])) > fitted.usual > fitted.of(np.array([EASY, 999]))


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


def test_noise_is_not_memorised() -> None:
    seen, _ = prompts(200)
    wrong = RNG.permutation(np.repeat([0.0, 4.0], 100))
    _, unseen = fit_difficulty(seen, wrong)
    assert np.corrcoef(unseen, wrong)[0, 1] < 0.2


def test_no_estimate_is_beyond_those_of_the_profiled_prompts() -> None:
    seen, wrong = prompts(200)
    fitted, unseen = fit_difficulty(seen, wrong)
    loud = PromptDifficulty(fitted.usual, fitted.least, fitted.most, fitted.tokens, tuple(99.0 for _ in fitted.weights))
    assert loud.of(np.array(seen[0])) == pytest.approx(unseen.max(), abs=1e-4)


def test_an_unknown_prompt_is_as_usual() -> None:
    nothing = np.empty(0, dtype=np.int32)
    assert PromptDifficulty().of(np.array([1, 2])) == 0.0
    fitted, unseen = fit_difficulty([(), (), ()], np.array([1.0, 0.0, 2.0]))
    assert (fitted.of(nothing), fitted.of(np.array([3])), unseen.tolist()) == (1.0, 1.0, [1.0, 1.0, 1.0])
    alike, unseen = fit_difficulty([(1, 2), (1, 2), (1, 2)], np.zeros(3))
    assert alike.of(np.array([1, 2])) == 0.0
    assert unseen.tolist() == [0.0, 0.0, 0.0]


def test_the_gate_judges_a_chunk_by_its_prompt_as_long_as_the_profile_has_words() -> None:
    difficulty = PromptDifficulty(1.0, 0.0, 4.0, (HARD,), (9.0,))
    profile = replace(Profile.load(MODELS / "profile.json"), difficulty=difficulty)
    chunk = Chunk(np.array([5, 6]), confidence=np.array([0.9, 0.4]), margin=np.array([0.8, 0.1]))

    def reasons(profile: Profile) -> list[str]:
        gates = [LearnedGate(profile, 0.2, BudgetController()) for _ in range(2)]
        prompts = [np.array([token, EASY + 1], dtype=np.int32) for token in (HARD, EASY)]
        return [gate.decide(GenerationState(prompt), chunk).reason for gate, prompt in zip(gates, prompts, strict=True)]

    hard, easy = reasons(profile)
    assert hard != easy
    hard, easy = reasons(profile.without_words())
    assert hard == easy

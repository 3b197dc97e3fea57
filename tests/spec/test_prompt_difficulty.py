"""What a prompt foretells: found where words tell it, honest about what it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.spec.gates.prompt_difficulty import NO_TROUBLE, Trouble, fit_trouble

RNG = np.random.default_rng(5)
HARD, EASY = 7, 8


def prompts(n: int) -> tuple[list[list[int]], np.ndarray]:
    """Prompts of a dozen words; one word makes a reply go wrong four times, another never."""
    found = [[*RNG.integers(20, 60, 10).tolist(), HARD if number % 2 else EASY] for number in range(n)]
    return found, np.array([4.0 if HARD in prompt else 0.0 for prompt in found])


def test_the_word_that_tells_is_found() -> None:
    seen, wrong = prompts(400)
    trouble, unseen = fit_trouble(seen, wrong)
    assert np.corrcoef(unseen, wrong)[0, 1] > 0.95
    new, truth = prompts(100)
    told = [trouble.of(np.array(prompt, dtype=np.int32)) for prompt in new]
    assert np.corrcoef(told, truth)[0, 1] > 0.95
    assert trouble.of(np.array([HARD, 999])) > trouble.usual > trouble.of(np.array([EASY, 999]))


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=3, max_size=12), st.integers(0, 999))
def test_what_is_said_of_a_prompt_is_said_without_it(words: list[list[int]], seed: int) -> None:
    """The short way and the long one: leaving each reply out of the fit."""
    wrong = np.random.default_rng(seed).integers(0, 5, len(words)).astype(np.float64)
    _, unseen = fit_trouble(words, wrong)
    tokens = sorted({t for own in words for t in own if sum(t in other for other in words) > 1})
    has = np.array([[(t in own) / np.sqrt(max(1, len(set(own)))) for t in tokens] for own in words])
    has = has.reshape(len(words), len(tokens))
    for out in range(len(words)):
        rest = np.arange(len(words)) != out
        gram = has[rest].T @ has[rest] + np.eye(len(tokens))
        weights = np.linalg.solve(gram, has[rest].T @ (wrong[rest] - wrong.mean()))
        assert unseen[out] == pytest.approx(wrong.mean() + has[out] @ weights, abs=1e-6)


def test_noise_is_not_learned_by_heart() -> None:
    seen, _ = prompts(200)
    wrong = RNG.permutation(np.repeat([0.0, 4.0], 100))
    _, unseen = fit_trouble(seen, wrong)
    assert np.corrcoef(unseen, wrong)[0, 1] < 0.2


def test_no_prompt_is_outside_of_what_was_seen() -> None:
    seen, wrong = prompts(200)
    trouble, unseen = fit_trouble(seen, wrong)
    loud = Trouble(trouble.usual, trouble.least, trouble.most, trouble.tokens, tuple(99.0 for _ in trouble.weights))
    assert loud.of(np.array(seen[0])) == pytest.approx(unseen.max(), abs=1e-4)


def test_nothing_known_is_as_usual() -> None:
    nothing = np.empty(0, dtype=np.int32)
    assert NO_TROUBLE.of(np.array([1, 2])) == 0.0
    trouble, unseen = fit_trouble([(), (), ()], np.array([1.0, 0.0, 2.0]))
    assert (trouble.of(nothing), trouble.of(np.array([3])), unseen.tolist()) == (1.0, 1.0, [1.0, 1.0, 1.0])
    alike, said = fit_trouble([(1, 2), (1, 2), (1, 2)], np.zeros(3))
    assert alike.of(np.array([1, 2])) == 0.0
    assert said.tolist() == [0.0, 0.0, 0.0]

"""The verification rule: a draft changes neither a greedy nor a sampled text, which is distributed as it should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EngineFailed
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import NO_IDS, Chunk, Sampling
from edgellm.spec.verification import judge, verify_greedy
from tests.spec.fakes import FakeDrafter, FakeVerifier, Letters, markov
from tests.spec.running import going
from tests.spec.running import ids as ids_of

N_VOCAB = 8
PROMPT = np.array([3], dtype=np.int32)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def rows_of(*tokens: int) -> np.ndarray:
    return np.eye(N_VOCAB, dtype=np.float32)[list(tokens)]


# --- greedy ---------------------------------------------------------------------------------------------------------


@given(wanted=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9), data=st.data())
def test_greedy_accepts_up_to_the_first_difference(wanted: list[int], data: st.DataObject) -> None:
    drafted = [data.draw(st.sampled_from([token, (token + 1) % N_VOCAB])) for token in wanted[:-1]]
    accepted, answer = verify_greedy(ids(*drafted), rows_of(*wanted))
    assert drafted[:accepted] == wanted[:accepted]
    assert accepted == len(drafted) or drafted[accepted] != wanted[accepted]
    assert answer == wanted[accepted]


def test_greedy_refuses_a_broken_row() -> None:
    rows = rows_of(1, 2)
    rows[1, 5] = np.nan
    with pytest.raises(EngineFailed):
        verify_greedy(ids(1), rows)


# --- sampled --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), drafted=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=4))
def test_drafts_leave_a_sampled_text_as_it_is_drawn_without_them(seed: int, drafted: list[int]) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(len(drafted) + 1, N_VOCAB)) * 3).astype(np.float32)
    sampling = Sampling(0.9, seed=seed)
    accepted, answer = judge(ids(*drafted), rows, sampling, 40)
    text = [*drafted[:accepted], answer]
    alone = [judge(NO_IDS, rows[at : at + 1], sampling, 40 + at)[1] for at in range(len(text))]
    assert text == alone


def test_a_draft_is_accepted_while_it_is_what_the_verifier_draws() -> None:
    rows = np.random.default_rng(0).normal(size=(3, N_VOCAB)).astype(np.float32)
    sampling = Sampling(0.9, seed=11)
    first, second = (draw(distribution(rows[at], sampling), 11, 40 + at) for at in range(2))
    third = draw(distribution(rows[2], sampling), 11, 42)
    other = (second + 1) % N_VOCAB
    assert judge(ids(first, second), rows, sampling, 40) == (2, third)
    assert judge(ids(first, other), rows, sampling, 40) == (1, second)
    assert judge(ids(other, second), rows, sampling, 40) == (0, first) or other == first


def test_a_near_draft_model_is_accepted_more_often_than_by_chance() -> None:
    """Two models draw by the same times. By numbers of their own they would agree in the sum of p q alone."""
    model, sampling = markov(1, N_VOCAB, 0.8), Sampling(1.0, 0, 1.0)
    noise = markov(2, N_VOCAB, 0.2)
    reply = [3]
    agreed = 0
    for position in range(1000):
        own, other = model(ids(*reply)), model(ids(*reply)) + noise(ids(*reply))
        drafted = draw(distribution(other, sampling), 0, position)
        accepted, answer = judge(ids(drafted), np.stack([own, own]), sampling, position)
        agreed += accepted
        reply.append(drafted if accepted else answer)
    assert agreed > 850


class NoEnd(Letters):
    def is_eog(self, token: int) -> bool:
        return False


class PointDrafter(FakeDrafter):
    """Offers its likeliest token, as retrieval does it: not what it would draw."""

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        token = int(self.logits(state.ids).argmax())
        sure = np.ones(1, dtype=np.float32)
        return Chunk(ids(token), sure, sure)


SETTINGS = {"plain": Sampling(1.0, 0, 1.0), "truncated": Sampling(0.8, 5, 0.9)}


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_gives_the_verifiers_text_whoever_drafts(setting: str, gamma: int) -> None:
    model = markov(1, N_VOCAB, 0.8)
    state = GenerationState(PROMPT, replace(SETTINGS[setting], seed=9), GenerationLimits(60, 100, gamma))
    other, own = markov(2, N_VOCAB, 0.8), FakeVerifier(model)
    wanted = ids_of(going(state, None, own, vocabulary=NoEnd()))
    for drafter in (FakeDrafter(other), FakeDrafter(model), PointDrafter(model)):
        again = GenerationState(PROMPT, state.sampling, state.limits)
        assert ids_of(going(again, drafter, FakeVerifier(model), vocabulary=NoEnd())) == wanted
    assert len(wanted) == 60

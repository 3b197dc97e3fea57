"""The verification rule: greedy, speculative sampling, and that the result is distributed as the verifier's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EngineFailed, ProtocolError
from edgellm.spec import verification
from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import generate
from edgellm.spec.sampling import distribution, draw, exact_distribution, uniforms
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import Chunk, Distribution, Sampling, Token
from edgellm.spec.verification import check_chunk, judge, residual, verify_greedy, verify_sampling
from tests.spec.fakes import FakeDrafter, FakeVerifier, Letters, Logits, markov

N_VOCAB = 8
PROMPT = np.array([3], dtype=np.int32)
Residual = Callable[[Distribution, Distribution | None, int], Distribution]


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


# --- speculative sampling, exactly ----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, N_VOCAB),
    top_p=st.floats(0.2, 1.0),
    other_k=st.integers(0, N_VOCAB),
    point=st.booleans(),
)
def test_acceptance_and_residual_add_up_to_p(seed: int, top_k: int, top_p: float, other_k: int, point: bool) -> None:
    """Summed over all drafts, what is accepted and what is drawn after a rejection make up p, token by token."""
    rng = np.random.default_rng(seed)
    p = exact_distribution(rng.normal(size=N_VOCAB).astype(np.float32) * 2, Sampling(1.0, top_k, top_p))
    q = distribution(rng.normal(size=N_VOCAB).astype(np.float32) * 2, Sampling(1.0, other_k, 0.9))
    if point:
        q = Distribution(q.ids[:1], np.ones(1, dtype=np.float32))
    full_p, full_q = np.zeros(N_VOCAB), np.zeros(N_VOCAB)
    full_p[p.ids], full_q[q.ids] = p.probs, q.probs
    accepted = np.minimum(full_p, full_q)
    made = accepted.copy()
    for drafted in q.ids.tolist():
        rejected = full_q[drafted] - accepted[drafted]
        rest = residual(p, q)
        assert np.all(rest.probs > 0)
        assert abs(rest.probs.sum() - 1) < 1e-5
        made[rest.ids] += rejected * rest.probs
    assert np.allclose(made, full_p, atol=1e-6)


def test_a_certain_rejection_and_a_certain_acceptance() -> None:
    sampling = Sampling(1.0, top_k=2, top_p=1.0)
    rows = np.array([[0, 5, 4, 0], [9, 0, 8, 0]], dtype=np.float32)
    numbers = np.full((2, 4), 0.999)
    q = Distribution(ids(0, 3), np.array([0.5, 0.5], np.float32))
    assert verify_sampling(Chunk(ids(3), distributions=(q,)), rows, sampling, numbers) == (0, 2)  # p(3) is 0
    assert verify_sampling(Chunk(ids(3), distributions=(q,)), rows, sampling, numbers * 0) == (0, 1)
    same = distribution(rows[0], sampling)
    assert verify_sampling(Chunk(ids(1), distributions=(same,)), rows, sampling, numbers) == (1, 2)  # p equals q


def test_residual_of_equal_distributions_is_p() -> None:
    p = Distribution(ids(1, 4), np.array([0.5, 0.5], np.float32))
    assert residual(p, p) is p


def test_a_point_mass_is_accepted_where_the_verifier_draws_the_same() -> None:
    rows = np.log(np.array([[0.2, 0.5, 0.3], [1.0, 1.0, 1.0]], dtype=np.float32))
    sampling, chunk = Sampling(1.0, 0, 1.0), Chunk(ids(1))
    for drawn_with, verdict in ((0.1, (0, 0)), (0.21, (1, 1)), (0.69, (1, 1)), (0.71, (0, 2))):
        numbers = np.array([[0.0, drawn_with, 0, 0], [0, 0.5, 0, 0]])
        assert verify_sampling(chunk, rows, sampling, numbers) == verdict


@given(seed=st.integers(0, 10_000), drafted=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=4))
def test_copied_drafts_leave_a_sampled_text_as_it_is_drawn_without_them(seed: int, drafted: list[int]) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(len(drafted) + 1, N_VOCAB)) * 3).astype(np.float32)
    sampling = Sampling(0.9, seed=seed)
    accepted, answer = judge(Chunk(ids(*drafted)), rows, sampling, 40)
    text = [*drafted[:accepted], answer]
    alone = [judge(Chunk(), rows[at : at + 1], sampling, 40 + at)[1] for at in range(len(text))]
    assert text == alone


def test_a_replay_draws_the_same() -> None:
    sampling = Sampling(0.9, seed=11)
    rows = np.random.default_rng(0).normal(size=(3, N_VOCAB)).astype(np.float32)
    chunk = Chunk(ids(1, 2))
    assert judge(chunk, rows, sampling, 40) == judge(chunk, rows, sampling, 40)
    assert judge(chunk, rows, sampling, 40) == verify_sampling(chunk, rows, sampling, uniforms(11, 40, 3))


# --- speculative sampling, counted ----------------------------------------------------------------------------------


def by_index(p: Distribution, q: Distribution) -> Distribution:
    """The mistake of subtracting truncated lists place by place instead of token by token."""
    left = p.probs.astype(np.float64)
    n = min(len(left), len(q.probs))
    left[:n] -= q.probs[:n]
    left = np.maximum(left, 0)
    return Distribution(p.ids, (left / left.sum()).astype(np.float32)) if left.sum() else p


def untouched(p: Distribution, q: Distribution) -> Distribution:
    """The mistake of drawing from p again."""
    return p


def only_what_was_not_drafted(p: Distribution, q: Distribution) -> Distribution:
    """The mistake of leaving out all that could have been drafted."""
    left = np.where(np.isin(p.ids, q.ids), 0.0, p.probs.astype(np.float64))
    return Distribution(p.ids, (left / left.sum()).astype(np.float32)) if left.sum() else p


def on_the_support_of_q(p: Distribution, q: Distribution) -> Distribution:
    """The mistake of forgetting what q had cut off."""
    rest = residual(p, q)
    inside = np.isin(rest.ids, q.ids)
    return Distribution(rest.ids[inside], rest.probs[inside]) if inside.any() else rest


def pairs(
    model: Logits, drafts: Logits, sampling: Sampling, n: int, gamma: int, point: bool
) -> Counter[tuple[int, ...]]:
    """How often each pair of first tokens is written in `n` replies of the whole loop."""
    seen: Counter[tuple[int, ...]] = Counter()
    drafter = PointDrafter(drafts) if point else FakeDrafter(drafts)
    for seed in range(n):
        reply = generate(
            GenerationState(
                PROMPT,
                Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed),
                GenerationLimits(max_tokens=2, context=100, gamma=gamma),
            ),
            vocabulary=NoEnd(),
            drafter=drafter,
            gate=AlwaysGate(),
            verifier=FakeVerifier(model),
            stats=Stats(),
        )
        seen[tuple(event.id for event in reply if isinstance(event, Token))] += 1
    return seen


class NoEnd(Letters):
    def is_eog(self, token: int) -> bool:
        return False


class PointDrafter(FakeDrafter):
    """Draws its tokens, and then offers them as point masses: legal, as retrieval does it."""

    def draft(self, prefix: np.ndarray, gamma: int, sampling: Sampling) -> Chunk:
        token = int(self.logits(prefix).argmax())
        sure = np.ones(1, dtype=np.float32)
        return Chunk(ids(token), sure, sure)


def excess(seen: Counter[tuple[int, ...]], model: Logits, sampling: Sampling) -> float:
    """Chi-square of the counts against the verifier alone, over its 1 - 1e-6 quantile: above 1 is a rejection."""
    n, statistic, cells = sum(seen.values()), 0.0, 0
    possible = set()
    first = exact_distribution(model(PROMPT), sampling)
    for a, pa in zip(first.ids.tolist(), first.probs.tolist(), strict=True):
        second = exact_distribution(model(ids(a)), sampling)
        for b, pb in zip(second.ids.tolist(), second.probs.tolist(), strict=True):
            expected = n * pa * pb
            statistic += (seen[a, b] - expected) ** 2 / expected
            cells += 1
            possible.add((a, b))
    if set(seen) - possible:
        return np.inf
    freedom = cells - 1
    z, spread = 4.753, 2 / (9 * freedom)  # Wilson and Hilferty
    return float(statistic / (freedom * (1 - spread + z * np.sqrt(spread)) ** 3))


SETTINGS = {
    "plain": Sampling(1.0, 0, 1.0),
    "truncated": Sampling(0.8, 5, 0.9),
}


@pytest.mark.parametrize(("gamma", "point"), [(1, False), (2, False), (1, True)], ids=["one", "two", "point"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_is_distributed_as_the_verifier_alone(setting: str, gamma: int, point: bool) -> None:
    model, drafts = markov(1, N_VOCAB, 0.8), markov(2, N_VOCAB, 0.8)
    seen = pairs(model, drafts, SETTINGS[setting], 2000, gamma, point)
    assert excess(seen, model, SETTINGS[setting]) < 1


def test_drafts_may_be_rounded_and_cut_as_roughly_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities in eighths, over three tokens: what they are drawn from is what they are judged by."""
    monkeypatch.setattr("edgellm.spec.sampling.UNITS", 8)
    monkeypatch.setattr("edgellm.spec.sampling.LEAST", 3)
    model, drafts = markov(1, N_VOCAB, 0.8), markov(2, N_VOCAB, 0.8)
    assert len(distribution(drafts(PROMPT), SETTINGS["plain"]).ids) <= 3
    seen = pairs(model, drafts, SETTINGS["plain"], 2000, 2, point=False)
    assert excess(seen, model, SETTINGS["plain"]) < 1


@pytest.mark.parametrize("wrong", [by_index, untouched, only_what_was_not_drafted, on_the_support_of_q])
def test_the_same_statistic_rejects_a_wrong_residual(wrong: Residual, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "residual", wrong)
    model, drafts = markov(1, N_VOCAB, 0.8), markov(2, N_VOCAB, 0.8)
    seen = pairs(model, drafts, SETTINGS["truncated"], 2000, 2, point=False)
    assert excess(seen, model, SETTINGS["truncated"]) > 1


def test_the_same_statistic_rejects_drafts_from_the_wrong_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn from all of q, and tested against the truncated q that is sent."""
    model, drafts = markov(1, N_VOCAB, 0.8), markov(2, N_VOCAB, 0.8)
    setting = SETTINGS["truncated"]

    class Careless(FakeDrafter):
        def propose(self, state: GenerationState, gamma: int) -> Chunk:
            prefix, sampling = state.ids, state.sampling
            honest = super().propose(state, 1)
            assert honest.distributions is not None
            whole = distribution(self.logits(prefix), Sampling(sampling.temperature, 0, 1.0))
            token = draw(whole, float(uniforms(sampling.seed, len(prefix), 1)[0, 3]))
            return Chunk(ids(token), honest.confidence, honest.margin, honest.distributions)

    monkeypatch.setitem(globals(), "FakeDrafter", Careless)
    assert excess(pairs(model, drafts, setting, 5000, 1, point=False), model, setting) > 1


# --- what comes over a link -----------------------------------------------------------------------------------------

HALF = np.array([0.5, 0.5], np.float32)


@pytest.mark.parametrize(
    ("chunk", "complaint"),
    [
        (Chunk(ids(1, N_VOCAB)), "outside the vocabulary"),
        (Chunk(ids(-1)), "outside the vocabulary"),
        (Chunk(ids(1, 2), distributions=(Distribution(ids(1, 2), HALF),)), "2 drafted tokens came with 1"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, N_VOCAB), HALF),)), "outside the vocabulary"),
        (Chunk(ids(1), distributions=(Distribution(ids(2, 1), HALF),)), "ascending"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, 1), HALF),)), "ascending"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, 2, 3), HALF),)), "ascending"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, 2), HALF * 2),)), "sum to 1"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, 2), np.array([1.5, -0.5], np.float32)),)), "sum to 1"),
        (Chunk(ids(1), distributions=(Distribution(ids(1, 2), HALF * np.nan),)), "sum to 1"),
        (Chunk(ids(1), distributions=(Distribution(ids(2, 3), HALF),)), "has probability 0"),
        (Chunk(ids(1), distributions=(Distribution(ids(), HALF[:0]),)), "sum to 1"),
    ],
)
def test_a_dishonest_chunk_is_refused(chunk: Chunk, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        check_chunk(chunk, N_VOCAB)


def test_an_honest_chunk_passes() -> None:
    check_chunk(Chunk(), N_VOCAB)
    check_chunk(Chunk(ids(1, 2)), N_VOCAB)
    for seed in range(20):
        check_chunk(
            FakeDrafter(markov(seed, N_VOCAB)).propose(GenerationState(PROMPT, Sampling(1.0, seed=seed)), 4), N_VOCAB
        )

"""Truncated distributions, drawing, and randomness by position."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EngineFailed
from edgellm.spec.sampling import ReplyGrammar, arrival_times, distribution, draw, penalised, top2, top_k
from edgellm.spec.types import GREEDY, NO_IDS, Constraint, Distribution, Penalties, Sampling
from edgellm.spec.verification import judge, verify_greedy
from tests.engine.logits import ids
from tests.spec.fakes import Listed, markov

numbers = (
    st.integers(1, 400)
    .flatmap(lambda n: st.binary(min_size=2 * n, max_size=2 * n))
    .map(lambda drawn: np.frombuffer(drawn, np.uint16))
)
"""Up to 400 of them, from bytes: one by one, hypothesis takes a hundred times as long to draw them."""
tied = numbers.map(lambda drawn: (drawn % 13).astype(np.float32) - 6)
"""From -6 to 6; few distinct values: many ties, also at the borders of top-k and top-p."""
free = numbers.map(lambda drawn: (drawn % 6001).astype(np.float32) / 100 - 30)
"""From -30 to 30."""
samplings = st.builds(Sampling, temperature=st.floats(0.05, 3.0), top_k=st.integers(0, 60), top_p=st.floats(0.01, 1.0))
penalties = st.builds(
    Penalties,
    repeat=st.floats(0.5, 3.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
    bias=st.dictionaries(st.integers(0, 500), st.floats(-100.0, 100.0), max_size=5).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    start=st.integers(0, 100),
)


def plain(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """The same by the book: sort everything, cut, cut, divide."""
    z = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    order = np.argsort(-z, kind="stable")[: sampling.top_k or None]
    probs = np.exp(z[order])
    probs /= probs.sum()
    keep = int(np.searchsorted(np.cumsum(probs), sampling.top_p)) + 1 if sampling.top_p < 1 else len(probs)
    probs = probs[:keep] / probs[:keep].sum()
    return dict(zip(order[:keep].tolist(), probs.tolist(), strict=True))


@given(logits=tied | free, sampling=samplings)
def test_a_distribution_is_temperature_then_top_k_then_top_p(logits: np.ndarray, sampling: Sampling) -> None:
    found = distribution(logits, sampling)
    expected = plain(logits, sampling)
    got = dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))
    apart = sum(abs(got.get(token, 0.0) - expected.get(token, 0.0)) for token in got.keys() | expected.keys())
    # at the border of the nucleus the last bit of a sum may decide over one token
    assert apart < 1e-4 or abs(len(got) - len(expected)) == 1


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=1), Sampling(1e-300), Sampling(1.0, top_p=1e-9)])
def test_all_mass_on_the_most_probable_token(sampling: Sampling) -> None:
    logits = np.array([0.0, 3.0, -2.0, 2.9], dtype=np.float32)
    found = distribution(logits, sampling)
    assert (found.ids.tolist(), found.probs.tolist()) == ([1], [1.0])


def test_the_highest_temperature_keeps_masked_tokens_out() -> None:
    logits = np.array([0.0, -np.inf, 9.0, 1.0], dtype=np.float32)
    for most in (0, 3):
        found = distribution(logits, Sampling(1e300, top_k=most, top_p=1.0))
        assert found.ids.tolist() == [0, 2, 3]
        assert found.probs == pytest.approx(1 / 3)


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_token_whose_probability_would_be_0_is_cut_off(top_k: int) -> None:
    """Its weight is the least number above 0, half of which is none."""
    logits = np.array([0.0, -103.2, -9.0, 0.0, -300.0], dtype=np.float32)
    found = distribution(logits, Sampling(1.0, top_k=top_k, top_p=1.0))
    assert found.ids.tolist() == [0, 2, 3]
    assert (found.probs > 0).all()


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_distribution(by: str) -> None:
    """Chi-square of 20,000 draws, below its 1 - 1e-6 quantile for 9 degrees of freedom."""
    shares = np.arange(1, 11) / 55
    found = Distribution(np.arange(0, 1000, 100, dtype=np.int32), shares.astype(np.float32))
    places = [(number, 5) if by == "seed" else (5, number) for number in range(20_000)]
    counts = np.bincount([draw(found, *place) // 100 for place in places], minlength=10)
    assert ((counts - 20_000 * shares) ** 2 / (20_000 * shares)).sum() < 46.0


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """Chi-square of pairs of draws, below its 1 - 1e-6 quantile for 15 degrees of freedom."""
    found = Distribution(np.arange(4, dtype=np.int32), np.full(4, 0.25, np.float32))
    drawn = np.array([draw(found, 3, position) for position in range(20_001)])
    counts = np.bincount(4 * drawn[:-1] + drawn[1:], minlength=16)
    assert ((counts - 1250) ** 2 / 1250).sum() < 58.0


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), ids=st.sets(st.integers(0, 2**20), min_size=2))
def test_a_token_has_its_time_whichever_others_are_looked_at(seed: int, position: int, ids: set[int]) -> None:
    tokens = np.array(sorted(ids), dtype=np.int32)
    whole = arrival_times(seed, position, tokens)
    assert np.array_equal(arrival_times(seed, position, tokens[1:]), whole[1:])
    assert (whole > 0).all()
    assert len(np.unique(whole)) == len(whole)
    for other in (arrival_times(seed ^ 1, position, tokens), arrival_times(seed, position + 1, tokens)):
        assert not np.intersect1d(other, whole).size


def test_the_times_are_the_same_on_every_machine() -> None:
    expected = [0.44422043470825906, 2.04515167341524, 1.061030812393575]
    np.testing.assert_allclose(arrival_times(42, 7, np.array([0, 1, 151_000], np.int32)), expected, rtol=1e-14)


@given(logits=free, penalties=penalties, text=st.lists(st.integers(0, 450), max_size=90))
def test_penalties_are_those_of_the_book(logits: np.ndarray, penalties: Penalties, text: list[int]) -> None:
    before = logits.copy()
    found = penalised(logits, np.array(text, dtype=np.int32), penalties)
    assert np.array_equal(logits, before)
    reply, recent = text[penalties.start :], text[-64:]
    for token, logit in enumerate(logits.tolist()):
        repeat = penalties.repeat if token in recent else 1.0
        times = reply.count(token)
        wanted = logit / repeat if logit > 0 else logit * repeat
        wanted -= times * penalties.frequency + (times > 0) * penalties.presence
        assert found[token] == pytest.approx(wanted + dict(penalties.bias).get(token, 0.0), rel=1e-4, abs=1e-3)


@given(logits=tied | free, sampling=samplings, min_p=st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, sampling: Sampling, min_p: float) -> None:
    everything = distribution(logits, sampling)
    kept = distribution(logits, replace(sampling, min_p=min_p))
    wanted = everything.probs >= np.float32(min_p) * everything.probs.max()
    assert np.array_equal(kept.ids, everything.ids[wanted])
    assert kept.probs.sum() == pytest.approx(1.0, abs=1e-5)
    assert kept.probs * everything.probs[wanted].sum() == pytest.approx(everything.probs[wanted], abs=1e-5)


def test_what_the_grammar_leaves_of_a_distribution() -> None:
    logits = np.arange(100_000, dtype=np.float32)[::-1].copy()
    likely = Distribution(np.array([0, 1, 2], np.int32), np.array([0.5, 0.3, 0.2], np.float32))
    start = Constraint("", 0)
    text = np.array([7], np.int32)
    some = ReplyGrammar(Listed(1, 2), start).limited(likely, logits, text)
    assert (some.ids.tolist(), some.probs.tolist()) == ([1, 2], pytest.approx([0.6, 0.4]))
    grammar = Listed(1000, 5000)
    none = ReplyGrammar(grammar, start).limited(likely, logits, text)
    assert (none.ids.tolist(), none.probs.tolist()) == ([1000], [1.0])
    assert ReplyGrammar(Listed(1), Constraint("", 5)).limited(likely, logits, text).ids.tolist() == [1]
    waits = ReplyGrammar(Listed(1), Constraint("", 0, (8, 9)))
    assert waits.limited(likely, logits, np.array([8, 7, 9], np.int32)) is likely
    assert waits.limited(likely, logits, np.array([7, 8, 9], np.int32)).ids.tolist() == [1]


# --- the rule of verification -----------------------------------------------------------------------------------------


N_VOCAB = 8


def rows_of(*tokens: int) -> np.ndarray:
    return np.eye(N_VOCAB, dtype=np.float32)[list(tokens)]


@given(wanted=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9), data=st.data())
def test_greedy_accepts_up_to_the_first_difference(wanted: list[int], data: st.DataObject) -> None:
    drafted = [data.draw(st.sampled_from([token, (token + 1) % N_VOCAB])) for token in wanted[:-1]]
    accepted, answer = verify_greedy(ids(*drafted), rows_of(*wanted))
    assert drafted[:accepted] == wanted[:accepted]
    assert accepted == len(drafted) or drafted[accepted] != wanted[accepted]
    assert answer == wanted[accepted]


@given(seed=st.integers(0, 10_000), drafted=st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=4))
def test_drafts_leave_a_sampled_text_as_it_is_drawn_without_them(seed: int, drafted: list[int]) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(len(drafted) + 1, N_VOCAB)) * 3).astype(np.float32)
    sampling = Sampling(0.9, seed=seed)
    accepted, answer = judge(ids(*drafted), rows, sampling, 40)
    text = [*drafted[:accepted], answer]
    alone = [judge(NO_IDS, rows[at : at + 1], sampling, 40 + at)[1] for at in range(len(text))]
    assert text == alone


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


def logits(least: int = 1, most: int = 40) -> st.SearchStrategy[np.ndarray]:
    number = st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1.0, float("-inf")])
    return (
        st.lists(number, min_size=least, max_size=most)
        .filter(lambda values: max(values) > float("-inf"))
        .map(lambda values: np.array(values, dtype=np.float32))
    )


@given(logits(least=2))
def test_top2_is_the_definition(row: np.ndarray) -> None:
    order = np.argsort(-row, kind="stable")
    wide = np.exp(row.astype(np.float64) - row.max())
    probs, facts = wide / wide.sum(), top2(row)
    assert facts.id == order[0]
    assert facts.p1 == pytest.approx(probs[order[0]], rel=1e-4)
    assert facts.p2 == pytest.approx(probs[order[1]], rel=1e-4, abs=1e-30)


@given(logits(), st.integers(0, 50))
def test_top_k_is_the_definition(row: np.ndarray, k: int) -> None:
    order = np.argsort(-row, kind="stable")[:k]
    ids = top_k(row, k)
    assert ids.tolist() == order.tolist()
    assert ids.dtype == np.int32


@pytest.mark.parametrize("n", [1_023, 1_024, 1_025, 5_000, 40_000])
@pytest.mark.parametrize("k", [1, 3, 40, 1_000, 2_000])
def test_top_k_of_large_vocabularies(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    row = (rng.standard_normal(n) * 3).round(1).astype(np.float32)  # rounded: many equals
    order = np.argsort(-row, kind="stable")[:k]
    assert top_k(row, k).tolist() == order.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_is_an_error_and_not_a_token(bad: float) -> None:
    row = np.full(8, bad, dtype=np.float32)
    partly = row if bad < 0 else np.array([0.0, bad, 1.0], dtype=np.float32)
    asked: tuple[Callable[[], object], ...] = (
        lambda: top2(row), lambda: top_k(partly, 3), lambda: distribution(partly, Sampling(1.0)),
        lambda: verify_greedy(NO_IDS, partly[None]),
    )  # fmt: skip
    for ask in asked:
        with pytest.raises(EngineFailed, match=r"largest logit|not a number"):
            ask()

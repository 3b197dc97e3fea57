"""Truncated distributions, drawing, and randomness by position."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgellm.errors import EngineFailed, InvalidOption
from edgellm.spec.sampling import (
    UNITS,
    WIDEST,
    Purpose,
    distribution,
    draw,
    exact_distribution,
    penalised,
    probability,
    rounded,
    uniforms,
    units,
    widest,
)
from edgellm.spec.types import GREEDY, Distribution, Penalties, Sampling

# few distinct values: many ties, also at the borders of top-k and top-p
tied = arrays(np.float32, st.integers(1, 400), elements=st.integers(-6, 6).map(float))
free = arrays(np.float32, st.integers(1, 400), elements=st.integers(-3000, 3000).map(lambda i: i / 100))
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 3.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
)
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
def test_a_distribution_is_what_its_record_promises(logits: np.ndarray, sampling: Sampling) -> None:
    found = exact_distribution(logits, sampling)
    assert found.ids.dtype == np.int32
    assert found.probs.dtype == np.float32
    assert np.all(np.diff(found.ids) > 0)
    assert np.all(found.probs > 0)
    assert abs(float(found.probs.sum(dtype=np.float64)) - 1) < 1e-5
    assert not sampling.top_k or len(found.ids) <= sampling.top_k
    cut = np.delete(logits, found.ids)
    assert not len(cut) or logits[found.ids].min() >= cut.max() - 1e-5  # what exp() cannot tell apart is equal


@given(logits=tied | free, sampling=samplings)
def test_a_distribution_is_temperature_then_top_k_then_top_p(logits: np.ndarray, sampling: Sampling) -> None:
    found = exact_distribution(logits, sampling)
    expected = plain(logits, sampling)
    got = dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))
    apart = sum(abs(got.get(token, 0.0) - expected.get(token, 0.0)) for token in got.keys() | expected.keys())
    # at the border of the nucleus the last bit of a sum may decide over one token
    assert apart < 1e-4 or abs(len(got) - len(expected)) == 1


def test_equal_logits_are_kept_in_order_of_id() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    assert exact_distribution(flat, Sampling(1.0, top_k=3, top_p=1.0)).ids.tolist() == [0, 1, 2]
    assert exact_distribution(flat, Sampling(1.0, top_k=10, top_p=0.45)).ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=1), Sampling(1e-300), Sampling(1.0, top_p=1e-9)])
def test_all_mass_on_the_most_probable_token(sampling: Sampling) -> None:
    logits = np.array([0.0, 3.0, -2.0, 2.9], dtype=np.float32)
    found = exact_distribution(logits, sampling)
    assert (found.ids.tolist(), found.probs.tolist()) == ([1], [1.0])


def test_the_highest_temperature_keeps_masked_tokens_out() -> None:
    logits = np.array([0.0, -np.inf, 9.0, 1.0], dtype=np.float32)
    for top_k in (0, 3):
        found = exact_distribution(logits, Sampling(1e300, top_k=top_k, top_p=1.0))
        assert found.ids.tolist() == [0, 2, 3]
        assert found.probs == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_an_error_and_not_a_token(bad: float) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    with pytest.raises(EngineFailed, match="not a number"):
        exact_distribution(logits, Sampling(1.0))
    with pytest.raises(EngineFailed):
        exact_distribution(np.full(4, -np.inf, dtype=np.float32), Sampling(1.0))


def test_a_masked_token_is_never_kept() -> None:
    logits = np.array([0.0, -np.inf, 1.0, -np.inf], dtype=np.float32)
    assert exact_distribution(logits, Sampling(1.0, top_k=3, top_p=1.0)).ids.tolist() == [0, 2]


def test_draw_falls_where_the_number_says() -> None:
    given_ = Distribution(np.array([3, 7, 9], np.int32), np.array([0.25, 0.5, 0.25], np.float32))
    assert [draw(given_, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0 - 2**-53)] == [3, 3, 7, 7, 9, 9]
    assert [probability(given_, token) for token in (3, 7, 9, 0, 8, 10)] == [0.25, 0.5, 0.25, 0.0, 0.0, 0.0]


@given(logits=tied | free, sampling=samplings)
def test_a_draft_is_drawn_from_whole_units_near_what_was_asked_for(logits: np.ndarray, sampling: Sampling) -> None:
    most = min(sampling.top_k or len(logits), widest(len(logits)))
    exact, found = exact_distribution(logits, replace(sampling, top_k=most)), distribution(logits, sampling)
    assert found.ids.dtype == np.int32
    assert found.probs.dtype == np.float32
    counts = units(found)
    assert (counts.sum(), counts.min() >= 1) == (UNITS, True)
    assert set(found.ids.tolist()) <= set(exact.ids.tolist())
    total = float(exact.probs.sum(dtype=np.float64))
    assert all(abs(probability(found, t) - p / total) < 1 / UNITS for t, p in zip(exact.ids, exact.probs, strict=True))
    again = rounded(found)
    assert (again.ids.tobytes(), again.probs.tobytes()) == (found.ids.tobytes(), found.probs.tobytes())


@given(seed=st.integers(0, 99), size=st.integers(1, 9000), heat=st.floats(0.1, 20.0))
def test_the_rounding_never_empties_a_wide_distribution(seed: int, size: int, heat: float) -> None:
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    found = distribution(logits, Sampling(heat, top_k=0, top_p=1.0))
    assert units(found).sum() == UNITS
    assert len(found.ids) <= widest(size)
    assert int(logits.argmax()) in found.ids


def test_a_flat_distribution_over_a_big_vocabulary_is_cut_to_what_can_be_sent() -> None:
    flat = np.zeros(152_000, dtype=np.float32)
    for sampling in (Sampling(1.0, top_k=0, top_p=1.0), Sampling(1.0, top_k=10_000, top_p=1.0)):
        found = distribution(flat, sampling)
        most = widest(len(flat))
        assert most < WIDEST
        assert (len(found.ids), {abs(UNITS // most - each) for each in units(found).tolist()}) == (most, {0, 1})


@pytest.mark.parametrize("probs", [[1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.125], [0.5, 0.5, 0.0]])
def test_what_is_not_rounded_has_no_units(probs: list[float]) -> None:
    with pytest.raises(InvalidOption, match="rounded"):
        units(Distribution(np.array([1, 2, 3], np.int32), np.array(probs, np.float32)))


@given(logits=tied | free, sampling=samplings, u=st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_has_a_probability(logits: np.ndarray, sampling: Sampling, u: float) -> None:
    found = distribution(logits, sampling)
    assert probability(found, draw(found, u)) > 0


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    cut=st.integers(0, 8),
    purpose=st.sampled_from(Purpose),
)
def test_a_position_has_its_numbers_however_chunks_are_cut(
    seed: int, position: int, cut: int, purpose: Purpose
) -> None:
    whole = uniforms(seed, position, 8, purpose)
    parts = (uniforms(seed, position, cut, purpose), uniforms(seed, position + cut, 8 - cut, purpose))
    assert np.array_equal(whole, np.concatenate(parts))
    assert np.all((whole >= 0) & (whole < 1))


def test_seeds_purposes_and_positions_have_numbers_of_their_own() -> None:
    rows = [uniforms(seed, 5, 3, purpose) for seed in (1, 2) for purpose in Purpose]
    numbers = np.concatenate([row.ravel() for row in rows])
    assert len(np.unique(numbers)) == len(numbers)


def test_the_numbers_are_the_same_on_every_machine() -> None:
    expected = [0.6136285572551732, 0.735298750025912, 0.5372827484814575, 0.507427232047714]
    assert uniforms(42, 7, 1)[0].tolist() == expected


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
    everything = exact_distribution(logits, sampling)
    kept = exact_distribution(logits, replace(sampling, min_p=min_p))
    wanted = everything.probs >= np.float32(min_p) * everything.probs.max()
    assert np.array_equal(kept.ids, everything.ids[wanted])
    assert kept.probs.sum() == pytest.approx(1.0, abs=1e-5)
    assert kept.probs * everything.probs[wanted].sum() == pytest.approx(everything.probs[wanted], abs=1e-5)

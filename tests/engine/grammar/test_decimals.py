"""Numbers between bounds: a text is accepted where its value is valid, and only there."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgellm.engine.grammar.automaton import TooLarge
from edgellm.engine.grammar.decimals import NumberBound, multiples, numbers
from tests.engine.grammar.walks import walk

values = st.decimals(-2000, 2000, places=2) | st.integers(-(10**9), 10**9).map(Decimal)
values |= st.floats(-1e6, 1e6).map(lambda value: Decimal(repr(value)))
bounds = st.none() | st.builds(NumberBound, values, st.booleans())
some_multiples = st.lists(st.sampled_from(["2", "5", "10", "100", "0.01", "0.5", "0.25", "3", "1000"]), max_size=1)


def holds(value: float | Decimal, low: NumberBound | None, high: NumberBound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.open)
    return above and (high is None or value < high.value or (value == high.value and not high.open))


@given(low=bounds, high=bounds, of=some_multiples, whole=st.booleans(), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_every_text_is_valid_also_as_a_binary_number(
    low: NumberBound | None, high: NumberBound | None, of: list[str], whole: bool, seed: int
) -> None:
    automaton = numbers(low, high, [Decimal(one) for one in of], whole=whole)
    assume(not automaton.is_empty)
    text = walk(automaton, seed)
    assert text is not None
    value = Decimal(text)
    assert holds(value, low, high)
    assert all(value % Decimal(one) == 0 for one in of)
    ends = [None if one is None else NumberBound(Decimal(float(one.value)), one.open) for one in (low, high)]
    assert holds(Decimal(float(text)), *ends), text
    assert str(value.normalize()) != "-0"
    assert not whole or "." not in text


@given(value=values, low=bounds, high=bounds)
@settings(max_examples=150, deadline=None)
def test_a_value_is_accepted_where_it_is_valid(
    value: Decimal, low: NumberBound | None, high: NumberBound | None
) -> None:
    text = f"{value:f}"
    assume(len(text.strip("-0.").replace(".", "")) <= 15 and len(text) <= 15 and text.strip("-0."))
    assert numbers(low, high, [], whole=False).accepts(text) == holds(value, low, high)
    if value == int(value):
        assert numbers(low, high, [], whole=True).accepts(str(int(value))) == holds(value, low, high)


@pytest.mark.parametrize("text", ["-0", "-0.0", "01", "1.", ".5", "+1", "1e3", "", "-", "1.0.0", "0x1"])
def test_what_is_no_number_or_none_that_is_written(text: str) -> None:
    assert not numbers(NumberBound(Decimal(-5), False), None, [], whole=False).accepts(text)


@pytest.mark.parametrize("zero", [Decimal(0), Decimal("-0"), Decimal("-0.0")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_bound_of_zero_may_have_a_sign(zero: Decimal, whole: bool) -> None:
    for is_open in (True, False):
        most, least = (
            numbers(None, NumberBound(zero, is_open), [], whole=whole),
            numbers(NumberBound(zero, is_open), None, [], whole=whole),
        )
        for text in ("-1", "0", "1"):
            assert most.accepts(text) == (int(text) < 0 or (text == "0" and not is_open))
            assert least.accepts(text) == (int(text) > 0 or (text == "0" and not is_open))


def test_zero_and_the_ends_belong_where_they_are_not_excluded() -> None:
    at = Decimal(0)
    for whole in (True, False):
        assert numbers(NumberBound(at, False), None, [], whole=whole).accepts("0")
        assert not numbers(NumberBound(at, True), None, [], whole=whole).accepts("0")
        assert numbers(None, NumberBound(at, False), [], whole=whole).accepts("0")
        assert numbers(NumberBound(at, True), NumberBound(at, True), [], whole=whole).is_empty
    assert numbers(
        NumberBound(Decimal(10) ** 17, False), NumberBound(Decimal(2) * 10**17, False), [], whole=True
    ).accepts("1" * 18)


def test_multiples_have_the_digits_of_the_number() -> None:
    cents = multiples(Decimal("0.01"))
    assert [cents.accepts(text) for text in ("1", "1.5", "1.25", "1.255")] == [True, True, True, False]
    assert [multiples(Decimal(5)).accepts(text) for text in ("0", "15", "-20", "21")] == [True, True, True, False]
    with pytest.raises(TooLarge):
        multiples(Decimal(100_003))

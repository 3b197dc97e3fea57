"""A prompt in parts: the simulation against the planner's own timeline, and against working it out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgellm.coldstart import costs, prefill_chunking
from edgellm.coldstart.costs import Device, ModelCosts, TransformerShape
from edgellm.coldstart.home import Home
from edgellm.coldstart.problem import makespan

CUTS = (((2, 7), (3, 5), (0, 15), (1, 13)), ((0, 40),), ((3, 3), (2, 6), (1, 12), (0, 19)))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tokens", [32, 256, 2048])
def test_in_one_part_it_is_the_planners_time(cut: tuple[tuple[int, int], ...], tokens: int) -> None:
    home = Home(costs.devices(), costs.model(), tokens)
    assert prefill_chunking.first_token(home, cut, tokens) == pytest.approx(makespan(home.task(), cut), rel=1e-9)


SHAPE = TransformerShape(layers=2, d_model=8, heads=1, kv_heads=1, d_head=8, d_ff=1_000_000)
MODEL = ModelCosts("two layers", SHAPE, (1.0, 1.0), (0.0, 0.0))
# a second a layer for every 100 tokens, however many there are at once
EVEN = Device("a", 100e6 / 1e2 * 6 * 8, 1.0, 1e9, 1.0, 1e12, 1e15, 1e15)


def test_two_stages_overlap_by_all_parts_but_one() -> None:
    """Nothing to load or send: with m parts the last one leaves after m + 1 turns, and not 2 m."""
    home, cut = Home((EVEN, replace(EVEN, name="b")), MODEL, 400, cold=False), ((0, 1), (1, 1))
    turn = {m: prefill_chunking.first_token(home, cut, 400 // m) / (m + 1) * m for m in (1, 2, 4)}
    assert turn[2] == pytest.approx(turn[1], rel=1e-3)
    assert turn[4] == pytest.approx(turn[1], rel=1e-3)


def test_a_part_waits_for_the_layers_and_for_the_part_before() -> None:
    assert prefill_chunking._stage([0.0, 0.0], [1.0, 5.0], [1.0, 1.0]) == [6.0, 7.0]  # both go on meanwhile
    assert prefill_chunking._stage([0.0, 9.0], [1.0, 2.0], [1.0, 2.0]) == [3.0, 13.0]
    assert prefill_chunking._stage([4.0], [1.0], [0.5]) == [4.5]


def test_short_parts_where_they_pay_and_long_ones_where_they_do_not() -> None:
    devices, cut = (EVEN, replace(EVEN, name="b")), ((0, 1), (1, 1))
    short = prefill_chunking.choose(Home(devices, MODEL, 1024, cold=False), cut)
    assert short[0] == prefill_chunking.SIZES[-1]
    assert "sooner than with 256" in short[1]
    slow_start = replace(EVEN, util_b=1e-4)  # it wants many tokens at once
    slow = (slow_start, replace(slow_start, name="b"))
    long = prefill_chunking.choose(Home(slow, MODEL, 1024, cold=False), cut)
    assert long[0] == prefill_chunking.SIZES[0]
    assert "would not be faster" in long[1]
    alone = prefill_chunking.choose(Home((EVEN,), MODEL, 1024, cold=False), ((0, 2),))
    assert alone[0] == prefill_chunking.SIZES[0]

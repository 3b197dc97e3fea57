"""A device in a plan, as it was measured and as it is now, and its curve of utilisation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.coldstart.costs import Device, LayersOnDevice, devices, fit_utilisation
from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange

HELD = LayersOnDevice(frozenset(range(8)), frozenset({2, 3}))


def test_a_device_is_as_it_was_measured_with_what_it_has_now() -> None:
    known = replace(devices()[0], unit="")
    now = known.updated(HELD, 5e9, "")
    assert now == replace(known, layers=HELD, memory=5e9)
    assert known.updated(HELD, 0.0, "").memory == known.memory  # it does not say
    assert devices()[0].updated(HELD, 5e9, "CUDA0").flops == known.flops  # described, and not measured


def test_speeds_of_another_unit_do_not_count() -> None:
    """The worker was measured on its processor, and computes on a card now; or the other way round."""
    for before, now in (("", "CUDA0"), ("CUDA0", "")):
        found = replace(devices()[0], unit=before).updated(HELD, 5e9, now)
        assert found == replace(Device.unmeasured(found.name), layers=HELD, memory=5e9, unit=now)


def test_layers_are_taken_where_pieces_begin_and_end() -> None:
    pieces = LayersOnDevice(frozenset(range(6)), begins=frozenset({0, 3}), ends=frozenset({2, 5}))
    assert pieces.takes(LayerRange(0, 3))
    assert pieces.takes(LayerRange(0, 6))
    assert not pieces.takes(LayerRange(1, 3))
    assert not pieces.takes(LayerRange(0, 4))
    assert not pieces.takes(LayerRange(3, 8))
    assert LayersOnDevice().takes(LayerRange(5, 99))


TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@given(peak=st.floats(1e9, 1e14), b=st.floats(1e-3, 2.0))
def test_a_curve_is_found_again(peak: float, b: float) -> None:
    found = fit_utilisation(TOKENS, [-peak * math.expm1(-b * t) for t in TOKENS])
    assert found.b == pytest.approx(b, rel=1e-3)
    assert found.peak == pytest.approx(peak, rel=1e-2)
    assert found.worst < 1e-2
    assert found.speed(64) == pytest.approx(-peak * math.expm1(-b * 64), rel=1e-2)


def test_errors_count_by_their_share() -> None:
    speeds = [-1e12 * math.expm1(-0.01 * t) * (1.1 if i % 2 else 0.9) for i, t in enumerate(TOKENS)]
    found = fit_utilisation(TOKENS, speeds)
    assert found.peak == pytest.approx(1e12, rel=0.1)
    assert 0.05 < found.worst < 0.2


def test_one_speed_is_met_exactly() -> None:
    found = fit_utilisation((4,), (5e9,))
    assert found.speed(4) == pytest.approx(5e9)
    assert found.worst < 1e-9


@pytest.mark.parametrize("speeds", [(), (0.0,), (-1.0,), (math.nan,), (1.0, 2.0)])
def test_what_is_no_speed_is_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidOption):
        fit_utilisation((1,), speeds)

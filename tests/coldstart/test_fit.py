"""The curve of utilisation, from speeds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.coldstart.hardware import fit_utilisation
from edgellm.errors import InvalidOption

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

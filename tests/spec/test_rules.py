"""Gates: the paper's equation, and draws that can be repeated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.spec.gates.rules import AlwaysGate, ConfidenceGate, NeverGate, p_conf
from edgellm.spec.types import Chunk
from tests.spec.fakes import at


def chunk(*confidence: float) -> Chunk:
    return Chunk(np.ones(len(confidence), dtype=np.int32), np.array(confidence, dtype=np.float32))


def test_p_conf_is_the_papers_equation() -> None:
    assert p_conf(0.5, 0.7) == 1.0
    assert p_conf(0.7, 0.7) == 1.0
    assert p_conf(0.85, 0.7) == pytest.approx(0.5)
    assert p_conf(1.0, 0.7) == pytest.approx(1 / (1 + math.exp(5)))
    assert p_conf(1.0 + 1e-7, 1.0) == 1.0
    assert p_conf(0.95, 0.8) == pytest.approx(1 / (1 + math.exp(2.5)))


@given(c=st.floats(0, 1), c_th=st.floats(0, 1))
def test_p_conf_is_a_probability_that_falls_with_confidence(c: float, c_th: float) -> None:
    assert 0.0 < p_conf(c, c_th) <= 1.0
    assert p_conf(c, c_th) >= p_conf(min(1.0, c + 0.05), c_th)


def test_the_share_of_chunks_offloaded_is_p_conf() -> None:
    gate = ConfidenceGate(0.6, seed=3)
    some = chunk(0.75, 0.85, 0.95)
    share = sum(gate.judge(some, written).offload for written in range(4000)) / 4000
    assert share == pytest.approx(p_conf(0.85, 0.6), abs=0.03)
    assert 0.2 < share < 0.3


def test_the_draws_can_be_repeated_and_depend_on_seed_and_place_alone() -> None:
    some = chunk(0.8)

    def draws(seed: int) -> list[bool]:
        return [ConfidenceGate(0.6, seed).judge(some, written).offload for written in range(64)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_each_decision_has_its_reason() -> None:
    assert "0.50 is not above 0.70" in ConfidenceGate(0.7).judge(chunk(0.4, 0.6), 0).reason
    assert "a chance of" in ConfidenceGate(0.7).judge(chunk(0.9), 0).reason
    assert AlwaysGate().decide(at(0), chunk(1.0)).offload
    assert not NeverGate().decide(at(0), chunk(0.1)).offload


@pytest.mark.parametrize("c_th", [-0.1, 1.1, math.nan])
def test_a_threshold_that_is_no_probability_is_refused(c_th: float) -> None:
    with pytest.raises(InvalidOption, match="not in"):
        ConfidenceGate(c_th)

"""Break-even: verification that changes nothing and only costs time is given up, and taken up again."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.spec.economy import PROBE, Economy, upper_bound
from edgellm.spec.records import Chunk, Verdict

CHUNK = Chunk(np.arange(4, dtype=np.int32))
ACCEPTED = Verdict(4, np.array([1], dtype=np.int32))
REJECTED = Verdict(2, np.array([1], dtype=np.int32))


def after(verdicts: list[Verdict], wait: float, draft: float = 0.01) -> Economy:
    economy = Economy()
    for verdict in verdicts:
        economy.round(CHUNK, 0, verdict, 4 * draft, wait)
    return economy


def test_before_anything_is_known_it_verifies() -> None:
    assert Economy().decide().offload


def test_a_verifier_that_changes_nothing_and_costs_time_is_left_alone() -> None:
    decision = after([ACCEPTED] * 100, wait=0.05).decide()
    assert not decision.offload
    assert "50.0 ms" in decision.reason


def test_it_is_used_where_it_is_faster_than_drafting() -> None:
    assert after([ACCEPTED] * 100, wait=0.005).decide().offload


def test_it_is_used_where_it_rejects() -> None:
    assert after([ACCEPTED, ACCEPTED, ACCEPTED, REJECTED] * 25, wait=0.05).decide().offload


def test_a_wait_that_went_into_drafts_that_were_used_costs_nothing() -> None:
    economy = Economy()
    for at in range(100):
        chunk = Chunk(np.arange(4, dtype=np.int32), ahead=4 if at % 8 else 0)
        economy.round(chunk, 0, ACCEPTED, 0.04 if at % 8 == 0 else 0.0, 0.04)
    assert economy.wait_seconds == pytest.approx(0.04)
    assert economy.decide().offload
    assert "costs" in economy.decide().reason


def test_few_chunks_prove_nothing() -> None:
    assert after([ACCEPTED] * 10, wait=0.05).decide().offload


def test_now_and_then_it_is_tried_and_a_change_brings_it_back() -> None:
    economy = after([ACCEPTED] * 100, wait=0.05)
    assert sum(economy.decide().offload for _ in range(4 * PROBE)) == 4
    for _ in range(4):
        economy.round(CHUNK, 0, REJECTED, 0.04, 0.05)
    assert economy.decide().offload


@pytest.mark.parametrize(("hits", "n", "bound"), [(0, 0, 1.0), (0, 100, 0.0263), (50, 100, 0.5813), (100, 100, 1.0)])
def test_wilson(hits: int, n: int, bound: float) -> None:
    assert upper_bound(hits, n) == pytest.approx(bound, abs=2e-4)

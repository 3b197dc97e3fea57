"""When another device's clock began, found out by its messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.mesh import pipeline as clocks
from edgellm.mesh.pipeline import StageClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(clocks, "perf_counter", lambda: now[0])
    return now


def test_the_message_that_took_least_tells_when_a_clock_began_and_not_when_it_was_asked_for(now: list[float]) -> None:
    clock = StageClock()
    for now[0], at in ((105.2, 2.0), (106.05, 3.0), (109.0, 4.0)):  # made at 103; 0.2, 0.05, 2 s on the way
        clock.observe(at)
    assert clock.began == pytest.approx(103.05, abs=1e-3)


def test_an_answer_tells_from_both_sides(now: list[float]) -> None:
    clock = StageClock()
    now[0] = 104.0
    clock.observe(0.1)  # made at 103.0, and 0.9 s on the way
    now[0] = 106.4
    clock.observe(3.2, 106.0)  # asked at 106.0, written at 106.2
    assert clock.began == pytest.approx(103.0)  # between 102.8 and 103.2


def test_two_clocks_may_part(now: list[float]) -> None:
    clock = StageClock()
    now[0] = 103.0
    clock.observe(0.0, 103.0)
    now[0] = 3703.3
    clock.observe(3600.0, 3703.2)  # it goes slow by a third of a second an hour
    assert clock.began == pytest.approx(103.25)


@pytest.mark.parametrize("at", [-1e9, 0.0, 1e9, float("inf"), float("nan")])
def test_a_time_that_cannot_be_moves_it_no_further_than_it_can_be(now: list[float], at: float) -> None:
    clock = StageClock()
    now[0] = 101.0
    clock.observe(at)
    clock.observe(at, 100.5)
    assert 100.0 <= clock.began <= 101.0


@given(st.lists(st.tuples(*[st.floats(0.0, 0.5)] * 3), min_size=1, max_size=20))
def test_what_was_answered_lies_between_the_question_and_its_answer(trips: list[tuple[float, float, float]]) -> None:
    made, moment = 103.0, [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "perf_counter", lambda: moment[0])
        clock = StageClock()
        moment[0] = 110.0
        for there, work, back in trips:
            sent = moment[0]
            written = sent + there + work
            moment[0] = written + back
            clock.observe(written - made, sent)
            told = written - made + clock.began
            assert sent - 1e-2 <= told <= moment[0] + 1e-2

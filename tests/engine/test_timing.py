"""Measurements on a busy machine: what disturbs some changes nothing, and what is impossible is not believed."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.cores import AGREE, is_plausible, minimum_times, plausible_times
from tests.programs import run_python

COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
ROUNDS = 6


@st.composite
def in_fours(draw: st.DrawFn) -> list[float]:
    """Return the seconds of a device that computes rows in fours or eights, and what is left over one by one."""
    one = draw(st.floats(1e-4, 1.0))
    together = draw(st.sampled_from([4, 8]))
    all_at_once = one * draw(st.floats(together / 4, together))
    return [rows // together * all_at_once + rows % together * one for rows in COUNTS]


@st.composite
def growing(draw: st.DrawFn) -> list[float]:
    """Return the seconds of a device that takes longer for more rows, in proportion to them at most."""
    seconds = [1.0]
    for before, rows in itertools.pairwise(COUNTS):
        seconds.append(seconds[-1] * (1.0 + draw(st.floats(0.0, 1.0)) * (rows / before - 1.0)))
    return seconds


true = st.one_of(in_fours(), growing())
spikes = st.sets(st.tuples(st.integers(0, ROUNDS - 1), st.sampled_from(COUNTS)))


@given(true, spikes, st.floats(1.5, 1e4))
def test_spikes_do_not_move_the_result(seconds: list[float], spiked: set[tuple[int, int]], factor: float) -> None:
    real = dict(zip(COUNTS, seconds, strict=True))
    calm = {key: [n for n in range(ROUNDS) if (n, key) not in spiked] for key in COUNTS}
    number = dict.fromkeys(COUNTS, -1)

    def measure(key: int) -> float:
        number[key] += 1
        disturbed = (number[key], key) in spiked and len(calm[key]) > 1
        return real[key] * (factor * (1.0 + number[key]) if disturbed else 1.0)

    assert minimum_times(measure, COUNTS, rounds=ROUNDS, seconds=60.0) == real


@given(true, st.integers(1, len(COUNTS) - 1), st.floats(300.0, 1e6))
def test_repairs_keep_real_dips_and_cut_spikes(seconds: list[float], at: int, factor: float) -> None:
    assert plausible_times(COUNTS, seconds) == tuple(seconds)
    assert is_plausible(COUNTS, seconds)
    spoiled = [*seconds[:at], factor * seconds[at], *seconds[at + 1 :]]
    assert not is_plausible(COUNTS, spoiled)
    mended = plausible_times(COUNTS, spoiled)
    assert [*mended[:at], *mended[at + 1 :]] == [*seconds[:at], *seconds[at + 1 :]]
    assert seconds[at] <= mended[at] <= 16.0 * seconds[at]


@given(true, st.integers(0, len(COUNTS) - 1))
def test_a_single_figure_that_is_far_too_small_is_noticed(seconds: list[float], at: int) -> None:
    assert not is_plausible(COUNTS, [*seconds[:at], seconds[at] / 300.0, *seconds[at + 1 :]])


@given(st.lists(st.floats(1e-9, 1e9), min_size=len(COUNTS), max_size=len(COUNTS)))
def test_what_was_repaired_is_possible(seconds: list[float]) -> None:
    assert is_plausible(COUNTS, plausible_times(COUNTS, seconds))


def test_it_ends_when_everything_was_measured_twice_and_when_the_time_is_over() -> None:
    times = itertools.count()
    measured: list[str] = []

    def measure(key: str) -> float:
        measured.append(key)
        return 1.0 + AGREE * (len(measured) % 2)

    assert minimum_times(measure, "ab", rounds=9, seconds=60.0) == {"a": 1.1, "b": 1.0}
    assert "".join(measured) == "abab"
    measured.clear()
    found = minimum_times(measure, "abcd", rounds=9, seconds=1.5, at_least=2, clock=lambda: float(next(times)))
    assert "".join(found) == "abc"
    measured.clear()
    assert set(minimum_times(measure, "abcd", rounds=9, seconds=0.0, at_least=2)) == {"a", "b"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the scheduler tells it on Linux")
def test_a_process_that_shares_its_processor_knows_that_it_waits() -> None:
    """In a process of its own, which has one processor with three others."""
    code = """
import os
from edgellm.engine.cores import BUSY, CpuWait
from testkit.processes.busy import busy
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with busy(3):
    waiting, n = CpuWait(), 0
    while waiting.share() <= BUSY:
        n += sum(range(10**5))
"""
    assert run_python(code).returncode == 0

"""Progressive graph scheduling: times that can be, the paper's greedy, and plans that are really the best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.graph_switching import (
    Instance,
    Plan,
    Span,
    Switch,
    latency,
    naive,
    progressive,
    simulate,
    synchronous,
)
from testkit.switching_instances import EXAMPLES, optimum, partition

FIG_8 = EXAMPLES[0][1]


def switches(*pairs: tuple[int, int]) -> Plan:
    return tuple(Switch(block, step) for block, step in pairs)


@st.composite
def instances(draw: st.DrawFn, blocks: int = 6, chunks: int = 4, most: int = 9) -> Instance:
    """Whole times, zero among them: sums are exact, and ties are common."""
    m = draw(st.integers(1, blocks))
    times = st.lists(st.integers(0, most), min_size=m, max_size=m)
    prefill, slower, load = draw(times), draw(times), draw(times)
    decode = tuple(float(fast + more) for fast, more in zip(prefill, slower, strict=True))
    return Instance(tuple(map(float, prefill)), decode, tuple(map(float, load)), draw(st.integers(1, chunks)))


@st.composite
def planned(draw: st.DrawFn) -> tuple[Instance, Plan]:
    instance = draw(instances())
    steps = draw(st.lists(st.integers(0, instance.steps), min_size=instance.blocks, max_size=instance.blocks))
    return instance, switches(*zip(draw(st.permutations(range(instance.blocks))), sorted(steps), strict=True))


@given(planned())
def test_whatever_the_plan_nothing_overlaps_and_everything_is_done(case: tuple[Instance, Plan]) -> None:
    instance, plan = case
    line = simulate(instance, plan)
    lanes: tuple[Sequence[Span], ...] = (line.computes, line.loads)
    assert [(done.chunk, done.block) for done in line.computes] == [
        (chunk, block) for chunk in range(instance.chunks) for block in range(instance.blocks)
    ]
    assert [load.block for load in line.loads] == [switch.block for switch in plan]
    for lane in lanes:
        assert all(one.end <= two.start for one, two in pairwise(lane))
    for done in line.computes:
        load = next(load for load in line.loads if load.block == done.block)
        assert load.end <= done.start if done.switched else done.end <= load.start
        assert done.end - done.start == (instance.decode if done.switched else instance.prefill)[done.block]
    assert all(load.end - load.start == instance.load[load.block] for load in line.loads)
    assert line.latency == max(interval.end for lane in lanes for interval in lane)
    assert line.latency == latency(instance, plan)


@given(planned())
def test_loads_keep_to_their_step_and_nothing_waits_without_a_cause(case: tuple[Instance, Plan]) -> None:
    instance, plan = case
    line = simulate(instance, plan)
    ends = {0.0, *(done.end for done in line.computes), *(load.end for load in line.loads)}
    assert ends >= {*(done.start for done in line.computes), *(load.start for load in line.loads)}
    for switch, load in zip(plan, line.loads, strict=True):
        assert all(done.end <= load.start for done in line.computes[: switch.step])
        mine = [at for at, done in enumerate(line.computes) if done.block == load.block and done.switched]
        assert mine == list(
            range(switch.step + (load.block - switch.step) % instance.blocks, instance.steps, instance.blocks)
        )


def test_figure_8() -> None:
    plan = progressive(FIG_8)
    assert plan == switches((3, 0), (1, 2), (2, 4), (0, 6))
    first = [done for done in simulate(FIG_8, plan).computes if done.chunk == 0]
    assert [done.switched for done in first] == [False, False, False, True]
    assert [latency(FIG_8, way(FIG_8)) for way in (synchronous, naive, progressive, optimum)] == [32, 26, 18, 18]


@pytest.mark.parametrize(
    ("instance", "begins"),
    [
        # A round is of the fewest computations that hide its load.
        (Instance((2.0,) * 4, (2.5,) * 4, (4.0, 4.0, 4.0, 3.9), chunks=2), ((3, 0), (1, 2))),
        (Instance((2.0,) * 4, (2.5,) * 4, (4.0, 4.0, 4.0, 4.1), chunks=2), ((3, 0), (2, 3))),
        # It counts the graphs that the blocks have by then: block 2 takes 2, and block 3 then 2.5.
        (Instance((2.0,) * 4, (2.5,) * 4, (4.0, 4.5, 4.0, 4.0), chunks=2), ((3, 0), (1, 2), (2, 4))),
        # It wraps around to the next chunk.
        (Instance((1.0,) * 3, (1.0,) * 3, (1.0, 2.0, 1.0), chunks=2), ((2, 0), (0, 1), (1, 2))),
        # At step 3 block 1 is left and nearly next: only behind its own computation is there time for its load.
        (Instance((1.0,) * 3, (1.0,) * 3, (2.0, 2.0, 1.0), chunks=3), ((2, 0), (0, 1), (1, 5))),
        # What no round is left for comes after the prefill.
        (Instance((1.0,) * 3, (1.0,) * 3, (9.0, 9.0, 9.0), chunks=1), ((2, 0), (1, 2), (0, 3))),
    ],
)
def test_the_greedys_rounds(instance: Instance, begins: tuple[tuple[int, int], ...]) -> None:
    assert progressive(instance)[: len(begins)] == switches(*begins)


def test_the_comparators_load_after_all_and_behind_each_last_computation() -> None:
    instance = Instance((1.0, 2.0), (1.0, 2.0), (5.0, 6.0), chunks=3)
    assert [load.start for load in simulate(instance, synchronous(instance)).loads] == [9.0, 14.0]
    assert [load.start for load in simulate(instance, naive(instance)).loads] == [7.0, 12.0]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=3))
@settings(max_examples=10)
def test_hiding_every_load_is_number_partitioning(items: list[int]) -> None:
    """Appendix A."""
    instance = partition(items)
    sums = {sum(some) for many in range(len(items)) for some in combinations(items, many)}
    hidden = latency(instance, optimum(instance)) == instance.chunks * sum(instance.prefill)
    assert hidden == (sum(items) / 2 in sums)

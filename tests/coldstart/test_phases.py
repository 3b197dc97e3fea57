"""Replies in phases: simulated times are those of the formulas, and moving is planned only where it pays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device, LayersOnDevice
from edgellm.coldstart.phases.model import Contention, PhaseProblem, cache_seconds, phase_problem, simulate
from edgellm.coldstart.phases.schedules import blocks, naive, progressive, progressive_moves, searched, synchronous
from edgellm.coldstart.phases.search import BETTER, plan_phases
from edgellm.coldstart.plan import MIN_SAVING
from edgellm.coldstart.problem import Cut, fits, makespan, per_token
from edgellm.errors import InvalidOption
from edgellm.layer_range import HERE

MODEL = ModelCosts.of(TransformerShape(12, 896, 14, 2, 64, 4864), "small")
NONE = Contention(1.0, 1.0, 1.0)


def home(seed: int, devices: int = 3) -> tuple[Device, ...]:
    """Draw devices of a home: disks from slow to fast, processors, lines, and room for a part of the model or all."""
    rng = np.random.default_rng(seed)
    weights = MODEL.bytes
    return tuple(
        Device(
            f"device {at}", flops=float(10 ** rng.uniform(9.5, 11.5)), util_a=1.0, util_b=0.05,
            disk=float(10 ** rng.uniform(7.5, 9.0)), memory=weights * float(rng.uniform(0.5, 3.0)),
            uplink=float(10 ** rng.uniform(7.5, 9.0)), downlink=float(10 ** rng.uniform(7.5, 9.0)), latency=2e-3,
            bandwidth=float(10 ** rng.uniform(9.0, 10.5)),
        )
        for at in range(devices)
    )  # fmt: skip


def wide_home() -> tuple[Device, ...]:
    """Three alike devices with slow disks: all load a third, and each would write alone sooner than the three."""
    one = Device("a", 1e11, 1.0, 0.05, 5e7, 2e10, 2e7, 2e7, 5e-3, 5e9)
    return one, replace(one, name="b"), replace(one, name="c")


@given(st.integers(0, 100_000), st.sampled_from([1, 2, 16, 64, 256]), st.booleans())
@settings(max_examples=10)
def test_a_plan_is_never_worse_than_staying_wide_narrow_or_alone(seed: int, tokens: int, sends: bool) -> None:
    devices = home(seed, 2 + seed % 3)
    problem = phase_problem(devices, MODEL, 64, tokens, sends_caches=sends)
    found = plan_phases(problem)
    if found is None:
        return
    for rival in (found.wide, found.narrow, *([found.single] if found.single else [])):
        plain = makespan(problem.task, rival.start) + problem.further * per_token(problem.task, rival.start)
        assert rival.seconds == pytest.approx(plain, rel=1e-6)
        assert found.reply.seconds <= plain / (1.0 - MIN_SAVING) * (1.0 + 1e-9)
    assert found.wide.ttft <= found.reply.ttft * (1.0 + 1e-6)
    if found.moving is not None:
        assert (
            found.moves or found.moving.seconds > (1.0 - BETTER) * found.unmoved.seconds - 1e-9 or not found.moving.made
        )
    if found.schedules is not None and found.moving is not None:
        assert found.moving.seconds <= found.schedules.progressive.seconds * (1.0 + 1e-9)


@given(st.integers(0, 100_000), st.booleans())
@settings(max_examples=10)
def test_a_simulated_reply_is_in_order(seed: int, sends: bool) -> None:
    devices = home(seed, 3)
    problem = phase_problem(devices, MODEL, 64, 64, sends_caches=sends)
    found = plan_phases(problem)
    if found is None or found.moving is None:
        return
    reply = found.moving
    assert reply.knots[0] == (1.0, makespan(problem.task, reply.start))
    assert reply.knots[-1][0] == pytest.approx(64)
    assert np.diff(np.array(reply.knots), axis=0).min() >= -1e-9
    for move in reply.made:
        assert move.begins <= move.loaded <= move.ready <= move.seconds
        assert reply.at(move.token) == pytest.approx(move.seconds)
        assert fits(problem.task, move.cut)
        assert move.pause >= 0.0
    tokens = [move.token for move in reply.made]
    assert tokens == sorted(set(tokens))


def test_a_block_moves_after_the_least_tokens_that_hide_its_load() -> None:
    """CoordGen's equations 1 and 2, with tokens as computations: k t >= load, and no less k."""
    problem = phase_problem(wide_home(), MODEL, 1, 256, contention=NONE, opening=0.0)
    start: Cut = ((0, 4), (1, 4), (2, 4))
    target: Cut = ((0, 12),)
    reply = simulate(problem, start, (target,))
    (move,) = reply.made
    load = float(problem.task.load[0, 4:].sum())
    token = per_token(problem.task, start)
    hidden = math.ceil(load / token)
    reading, source = cache_seconds(problem, start, target, 2 + hidden)
    assert source == "recomputed"
    assert move.token == 1 + hidden + math.ceil(reading / token)
    assert move.loaded == pytest.approx(reply.ttft + load)
    after = reply.at(256) - reply.at(move.token + 1)
    assert after == pytest.approx((256 - move.token - 1) * per_token(problem.task, target))


def test_moving_pays_in_long_replies_only() -> None:
    short, long = (plan_phases(phase_problem(wide_home(), MODEL, 8, tokens)) for tokens in (2, 256))
    assert short is not None
    assert long is not None
    assert not short.moves
    assert long.moves
    assert long.reply.seconds < 0.95 * min(long.wide.seconds, long.narrow.seconds)
    assert long.pays_from is not None
    assert 2 < long.pays_from < 256
    assert long.schedules is not None
    assert long.reply.seconds <= min(
        long.schedules.synchronous.seconds, long.schedules.naive.seconds, long.schedules.progressive.seconds
    )


def test_contention_makes_moves_dearer() -> None:
    quiet, busy = (
        plan_phases(phase_problem(wide_home(), MODEL, 8, 256, contention=one))
        for one in (NONE, Contention(1.5, 2.0, 2.0))
    )
    assert quiet is not None
    assert busy is not None
    assert quiet.reply.seconds < busy.reply.seconds
    with pytest.raises(InvalidOption, match=r"passes of the contention is 0\.5"):
        Contention(passes=0.5)


def test_a_cache_is_sent_where_that_is_cheaper() -> None:
    start: Cut = ((0, 4), (1, 4), (2, 4))
    target: Cut = ((0, 12),)
    problem = phase_problem(wide_home(), MODEL, 2000, 64, sends_caches=True)
    sent, source = cache_seconds(problem, start, target, 2000)
    read, _ = cache_seconds(replace(problem, sends_caches=False), start, target, 2000)
    assert source == "sent"
    assert sent < read
    slow = phase_problem([replace(one, uplink=1e4) for one in wide_home()], MODEL, 2000, 64, sends_caches=True)
    assert cache_seconds(slow, start, target, 2000)[1] == "recomputed"
    here = [replace(one, name=name) for one, name in zip(wide_home(), ("a", HERE, "c"), strict=True)]
    passing = phase_problem(here, MODEL, 2000, 64, sends_caches=True)
    assert (
        cache_seconds(passing, start, target, 2000)[0] > sent
    )  # to the coordinator first, also from the device itself


def test_loaded_layers_are_not_loaded_again_and_absent_ones_not_at_all() -> None:
    first, second, third = wide_home()
    half = frozenset(range(6))
    devices = (
        replace(first, layers=LayersOnDevice(half)),
        replace(second, layers=LayersOnDevice(frozenset(range(12)) - half)),
        replace(third, layers=LayersOnDevice(frozenset(range(12)), frozenset(range(12)))),
    )
    found = plan_phases(phase_problem(devices, MODEL, 8, 256))
    assert found is not None
    assert not found.moves
    assert found.reply.start == ((2, 12),)
    devices = (*devices[:2], replace(third, layers=LayersOnDevice(half)))
    found = plan_phases(phase_problem(devices, MODEL, 8, 256))
    assert found is not None
    assert {device for device, _ in found.reply.start} <= {0, 1, 2}
    for cut in (found.reply.start, *(move.cut for move in found.reply.made)):
        at = 0
        for device, count in cut:
            assert (devices[device].layers.stored or frozenset()).issuperset(range(at, at + count))
            at += count


def problem_of(tokens: int) -> PhaseProblem:
    return phase_problem(wide_home(), MODEL, 8, tokens)


def test_the_three_schedules_end_in_the_same_placement() -> None:
    problem, start, target = problem_of(256), ((0, 4), (1, 4), (2, 4)), ((1, 12),)
    assert sum(block.stop - block.start for block in blocks(problem, start, target)) == 8
    assert progressive_moves(problem, start, target)[-1] == target
    waited, chained, hidden = (one(problem, start, target) for one in (synchronous, naive, progressive))
    best = searched(problem, start, target)
    assert best is not None
    assert best.seconds <= hidden.seconds
    for reply in (waited, chained):
        assert reply.at(1) == pytest.approx(makespan(problem.task, start))
        assert reply.at(256) == pytest.approx(reply.seconds)
    assert waited.moves[0].pause > 0.0


def test_without_room_for_both_placements_nothing_moves() -> None:
    tight = [replace(one, memory=MODEL.bytes * 0.36) for one in wide_home()]
    found = plan_phases(phase_problem(tight, MODEL, 8, 256))
    assert found is not None
    assert not found.moves
    assert found.single is None

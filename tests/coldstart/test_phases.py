"""Replies in phases: simulated times are those of the formulas, and moving is planned only where it pays."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.costs import Device, LayersOnDevice, ModelCosts, TransformerShape
from edgellm.coldstart.phases import BETTER, Contention, PhaseProblem, Phases, fit_together, moving, plan_phases
from edgellm.coldstart.problem import Cut, Home, Objective, fits, makespan, never, per_token
from edgellm.layer_range import LayerRange

MODEL = ModelCosts.of(TransformerShape(12, 896, 14, 2, 64, 4864), "small")


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


WIDE: Cut = ((0, 4), (1, 4), (2, 4))
ALONE: Cut = ((0, 12),)


def problem_of(tokens: int, devices: Sequence[Device] = (), tokens_in: int = 8) -> PhaseProblem:
    """The problem of a reply of so many tokens, by default in the wide home."""
    return PhaseProblem(Home(devices or wide_home(), MODEL, tokens_in, tokens))


def planned(problem: PhaseProblem, start: Cut | None = None, objective: Objective = "ttft") -> Phases | None:
    """The plan from a placement, by default that with the earliest first token; None if nothing moves, or fits."""
    home, start = replace(problem.home, objective=objective), start or problem.solved(0, never)
    return None if start is None else plan_phases(home, home.shares(start))


@given(st.integers(0, 100_000), st.sampled_from([1, 2, 16, 64, 256]))
@settings(max_examples=20)
def test_a_plan_stays_or_moves_where_that_pays_and_is_in_order(seed: int, tokens: int) -> None:
    problem = problem_of(tokens, home(seed, 2 + seed % 3), 64)
    found = planned(problem)
    if found is None:
        return
    start, reply = found.unmoved.start, found.reply
    plain = makespan(problem.task, start) + problem.home.further * per_token(problem.task, start)
    assert found.unmoved.seconds == pytest.approx(plain, rel=1e-6)
    if (move := reply.move) is not None:
        assert plain - reply.seconds > BETTER * move.seconds
        assert move.loaded <= move.ready <= move.seconds < reply.seconds
        assert reply.ttft < move.ready
        assert 1 < move.token < tokens
        assert move.cut == found.target
        assert fits(problem.task, move.cut)
        assert fit_together(problem, start, move.cut)
    else:
        assert per_token(problem.task, found.target) < per_token(problem.task, start)


def test_a_placement_takes_over_after_the_least_tokens_that_hide_its_load() -> None:
    """CoordGen's equations 1 and 2, with tokens as computations: k t >= load, and no less k."""
    problem = replace(problem_of(256, tokens_in=1), contention=Contention(1.0, 1.0, 1.0, 0.0))
    reply = moving(problem, WIDE, ALONE)
    assert reply is not None
    assert reply.move is not None
    load = float(problem.task.load[0, 4:].sum())
    token, then = per_token(problem.task, WIDE), per_token(problem.task, ALONE)
    hidden = math.ceil(load / token)
    reading = makespan(problem.reading(2 + hidden), ALONE)
    assert reply.move.token == 1 + hidden + math.ceil(reading / token)
    assert reply.move.loaded == pytest.approx(reply.ttft + load)
    assert reply.move.seconds == pytest.approx(reply.ttft + (reply.move.token - 1) * token)
    assert reply.seconds >= reply.move.seconds + (256 - reply.move.token) * then
    assert moving(replace(problem, home=replace(problem.home, tokens_out=hidden)), WIDE, ALONE) is None
    contended = moving(problem_of(256, tokens_in=1), WIDE, ALONE)
    assert contended is not None
    assert contended.seconds > reply.seconds


def test_moving_pays_in_long_replies_only() -> None:
    short, long = planned(problem_of(2)), planned(problem_of(256))
    assert short is not None
    assert long is not None
    assert short.reply.move is None
    assert len(short.following) == 1  # for the next reply
    assert long.reply.move is not None
    assert long.reply.seconds < 0.95 * long.unmoved.seconds
    assert planned(problem_of(1024), ALONE) is None


def test_a_whole_reply_may_begin_elsewhere_than_where_it_would_stay() -> None:
    found = planned(problem_of(256), ALONE, "reply")
    assert found is not None
    assert found.unmoved.start == ALONE
    assert len(found.first) == 3


def test_layers_that_are_absent_are_not_moved_to() -> None:
    half = LayersOnDevice(frozenset(range(6)))
    assert planned(problem_of(256, [replace(one, layers=half) for one in wide_home()]), WIDE) is None
    first, *others = wide_home()
    whole = replace(first, layers=LayersOnDevice(frozenset(range(12))))
    found = planned(problem_of(256, [whole, *(replace(one, layers=half) for one in others)]), ((1, 6), (0, 6)))
    assert found is not None
    assert [share.layers for share in found.following] == [LayerRange(0, 12)]


def test_without_room_for_both_placements_nothing_moves() -> None:
    assert planned(problem_of(256, [replace(one, memory=MODEL.bytes * 0.36) for one in wide_home()])) is None

"""The fast planner finds what Algorithm 1 finds, and what it proves is so."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgellm.coldstart import costs, exact_search, reply_search
from edgellm.coldstart import plan as planning
from edgellm.coldstart.costs import Device, LayersOnDevice, ModelCosts, TransformerShape
from edgellm.coldstart.exact_search import fastest_first_token
from edgellm.coldstart.plan import plan, solve
from edgellm.coldstart.problem import OVERLAPS, Home, Overlap, Task, fits, makespan, restrict_to_stored, warm
from edgellm.errors import PlanImpossible
from testkit.algorithm1 import algorithm1
from testkit.random_fleets import FAMILIES, SAME, drawn, every_plan


def uneven(task: Task, rng: np.random.Generator) -> Task:
    """The task with layers that differ, an embedding and a head, and times for further tokens."""
    weight, work = rng.uniform(0.6, 1.5, task.layers), rng.uniform(0.8, 1.2, task.layers)
    weight[0] += 2.0
    weight[-1] += 2.0
    load, step = task.load * weight, task.compute * work * rng.uniform(0.1, 0.5, (task.devices, 1))
    hop = rng.uniform(0.0, 0.1, task.send.shape)
    return replace(
        task, load=load, compute=task.compute * work, need=weight, capacity=task.capacity * 1.4, step=step, hop=hop,
        alone_load=0.9 * load.sum(1), alone_need=float(weight.sum() - 2.0),
    )  # fmt: skip


def stored_in_part(task: Task, rng: np.random.Generator) -> Task:
    """The task with some layers that are nowhere on some devices, and some that are loaded."""
    devices = []
    for device in costs.devices()[:3]:
        stored = frozenset(np.flatnonzero(rng.random(6) < 0.7).tolist())
        loaded = frozenset(layer for layer in stored if rng.random() < 0.3)
        devices.append(replace(device, layers=LayersOnDevice(stored, loaded)))
    found = restrict_to_stored(replace(task, capacity=task.capacity + 1.0), devices)
    for cut in every_plan(found):
        first = 0
        for at, count in cut:
            assert (devices[at].layers.stored or frozenset()).issuperset(range(first, first + count))
            first += count
    return found


@pytest.mark.parametrize("where", ["anywhere", "where files begin", "where they are stored"])
@given(st.integers(0, 10_000), st.sampled_from(sorted(FAMILIES)), st.sampled_from(OVERLAPS), st.data())
@settings(max_examples=30)
def test_plans_are_the_best_of_all(where: str, seed: int, family: str, overlap: Overlap, data: st.DataObject) -> None:
    """Layers differ; stages may begin and end where their files or the layers are; layers are loaded, or not."""
    rng, further = np.random.default_rng(seed), data.draw(st.sampled_from([0, 9]))
    task = uneven(drawn(family, rng, 3, 6, overlap), rng)
    if where == "where files begin":
        task = replace(task, begins=rng.random((3, 6)) < 0.6, ends=rng.random((3, 6)) < 0.6)
        task = replace(task, files=rng.random(6) < 0.4, opening=rng.random(3))
    elif where == "where they are stored":
        task = stored_in_part(task, rng)
    if data.draw(st.booleans()):
        task = warm(task)
    least = min((reply_search.seconds(task, further, cut) for cut in every_plan(task)), default=None)
    for found in (solve(task, further), reply_search.fastest_reply(task, further)):
        if least is None:
            assert found is None
            continue
        assert found is not None
        assert found.optimal
        assert fits(task, found.cut)
        assert found.seconds == pytest.approx(least, rel=SAME)
    if where == "anywhere" and not further:
        reference = algorithm1(task)
        assert (None if reference is None else reference[0]) == (least and pytest.approx(least, rel=1e-9))


@given(st.integers(0, 10_000), st.sampled_from(sorted(FAMILIES)), st.sampled_from(OVERLAPS))
@settings(max_examples=25)
@example(45, "wide", "paper")
def test_it_finds_what_algorithm_1_finds(seed: int, family: str, overlap: Overlap) -> None:
    task = drawn(family, np.random.default_rng(seed), 5, 15, overlap)
    reference, found = algorithm1(task), fastest_first_token(task)
    assert reference is not None
    assert found is not None
    assert found.optimal
    assert found.seconds == pytest.approx(reference[0], rel=SAME)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_plan_that_is_not_proved_says_how_good_it_is_at_least(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = drawn(family, np.random.default_rng(1), 7, 30, "streamed")
    best = fastest_first_token(task)
    assert best is not None
    assert best.gap == 0.0
    monkeypatch.setattr(exact_search, "ROOMS", (1, exact_search.ROOMS[-1]))
    stopped = fastest_first_token(task, lambda: True)
    lacking = replace(task, load=np.where(np.random.default_rng(1).random(task.load.shape) < 0.35, np.inf, task.load))
    assert fastest_first_token(lacking, lambda: True) is not None  # though a narrow search finds no plan
    monkeypatch.setattr(exact_search, "ROOMS", (1, 1, 1))
    for found in (stopped, fastest_first_token(task)):
        assert found is not None
        assert fits(task, found.cut)
        assert not found.optimal
        assert found.floor <= best.seconds <= found.seconds * (1.0 + SAME)


def test_what_fits_nowhere_is_said_with_what_is_needed() -> None:
    with pytest.raises(PlanImpossible, match=r"needs 26\.4 GB with its cache, and the devices have 16\.0 GB"):
        plan(Home(costs.devices()[2:], costs.model(), 256))


def test_memories_that_would_do_together_and_do_not_apart() -> None:
    shape = replace(costs.model().shape, layers=3)
    roomy = [replace(device, memory=1.9 * shape.weights) for device in costs.devices()[:2]]
    one = replace(costs.model(), shape=shape, layer_bytes=(shape.weights,) * 3, cache_bytes=(0.0,) * 3)
    with pytest.raises(PlanImpossible, match="no split of it fits"):
        plan(Home(roomy, one, 1))


def test_the_plan_carries_why_and_what_else_there_is() -> None:
    found = plan(Home(costs.devices(), costs.model(), 8192, overlap="paper"))
    assert found.optimal
    assert found.best_single is None
    assert dict(found.unused) == {"Device 4": "no plan with it is faster"}
    assert found.advice.startswith("Split it over Device 3, Device 2 and Device 1: 7.03 s. No single device")
    assert [stage.layers.start for stage in found.option.stages] == [0, 3, 13]
    assert sum(stage.size for stage in found.option.stages) == pytest.approx(costs.model().bytes)


def test_a_long_reply_is_split_less_widely() -> None:
    first = plan(Home(costs.devices(), costs.model(), 1024, 256))
    whole = plan(Home(costs.devices(), costs.model(), 1024, 256, "reply"))
    assert len(whole.option.stages) < len(first.option.stages)
    assert whole.option.reply_s < first.option.reply_s
    assert whole.option.ttft_s > first.option.ttft_s


def test_it_says_not_to_split_where_that_is_as_fast() -> None:
    strong, *others = costs.devices()
    roomy = replace(strong, memory=64e9, disk=5e10)
    slow = [replace(device, uplink=1e6, downlink=1e6) for device in others]
    found = plan(Home([roomy, *slow], costs.model(), 1024))
    assert found.option.alone
    assert found.advice.startswith("Use Device 1 alone: ")
    assert found.option.ttft_s == found.best_single.ttft_s if found.best_single else False


def test_a_gain_too_small_to_be_worth_it_is_called_so() -> None:
    found = plan(Home(costs.devices(), costs.model(), 256))
    one = replace(found.option, ttft_s=found.option.ttft_s * 1.02, stages=found.option.stages[:1])
    assert "not worth it" in replace(found, best_single=one).advice
    much = replace(one, ttft_s=found.option.ttft_s * 2.0)
    assert "(50% less)" in replace(found, best_single=much).advice
    assert (
        "split only for a cold start" in replace(found, best_single=much, warm_single=replace(one, ttft_s=0.1)).advice
    )


# --- a prompt in parts ------------------------------------------------------------------------------------------------


CUTS = (((2, 7), (3, 5), (0, 15), (1, 13)), ((0, 40),), ((3, 3), (2, 6), (1, 12), (0, 19)))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tokens", [32, 256, 2048])
def test_in_one_part_it_is_the_planners_time(cut: tuple[tuple[int, int], ...], tokens: int) -> None:
    home = Home(costs.devices(), costs.model(), tokens)
    assert planning.time_by_parts(home, cut, tokens) == pytest.approx(makespan(home.task(), cut), rel=1e-9)


SHAPE = TransformerShape(layers=2, d_model=8, heads=1, kv_heads=1, d_head=8, d_ff=1_000_000)
MODEL = ModelCosts("two layers", SHAPE, (1.0, 1.0), (0.0, 0.0))
# a second a layer for every 100 tokens, however many there are at once
EVEN = Device("a", 100e6 / 1e2 * 6 * 8, 1.0, 1e9, 1.0, 1e12, 1e15, 1e15)


def test_two_stages_overlap_by_all_parts_but_one() -> None:
    """Nothing to load or send: with m parts the last one leaves after m + 1 turns, and not 2 m."""
    home, cut = Home((EVEN, replace(EVEN, name="b")), MODEL, 400, cold=False), ((0, 1), (1, 1))
    turn = {m: planning.time_by_parts(home, cut, 400 // m) / (m + 1) * m for m in (1, 2, 4)}
    assert turn[2] == pytest.approx(turn[1], rel=1e-3)
    assert turn[4] == pytest.approx(turn[1], rel=1e-3)


def test_short_parts_where_they_pay_and_long_ones_where_they_do_not() -> None:
    devices, cut = (EVEN, replace(EVEN, name="b")), ((0, 1), (1, 1))
    short = planning.choose_part(Home(devices, MODEL, 1024, cold=False), cut)
    assert short == planning.PART_SIZES[-1]
    slow_start = replace(EVEN, util_b=1e-4)  # it wants many tokens at once
    slow = (slow_start, replace(slow_start, name="b"))
    long = planning.choose_part(Home(slow, MODEL, 1024, cold=False), cut)
    assert long == planning.PART_SIZES[0]
    alone = planning.choose_part(Home((EVEN,), MODEL, 1024, cold=False), ((0, 2),))
    assert alone == planning.PART_SIZES[0]

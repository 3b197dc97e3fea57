"""CSGO's equations and its setting, number by number; and devices as they were measured and as they are now."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.coldstart import costs
from edgellm.coldstart.costs import Device, LayersOnDevice, Link, ModelCosts, TransformerShape, devices, fit_utilisation
from edgellm.coldstart.problem import Home, Overlap, Task, fits, makespan, per_token, streamed, timeline
from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange
from testkit.random_fleets import uniform


def test_a_layer_of_qwen3_weighs_what_the_equations_say() -> None:
    shape = costs.model().shape
    assert shape.weights == pytest.approx(660.6e6, rel=1e-4)  # eq. 5-7
    assert shape.activation(8192) == 2 * 8192 * 5120  # eq. 4
    assert shape.flops(1024) == pytest.approx(4 * 1024 * 128 * (5120 * 48 + 1024 * 40) + 6 * 1024 * 5120 * 17408)
    assert shape.flops(1, 1024) < shape.flops(1024) / 1000


def test_shannon_and_path_loss_give_the_rates_of_table_1() -> None:
    found = [(round(device.uplink / 1e6), round(device.downlink / 1e6)) for device in costs.devices()]
    assert found == [(1721, 1854), (1287, 1473), (1031, 1297), (914, 1180)]


@pytest.mark.parametrize(("tokens", "caps"), [(256, (30, 15, 12, 12)), (8192, (30, 15, 11, 11))])
def test_memory_holds_as_many_layers_as_equation_22_lets_it(tokens: int, caps: tuple[int, ...]) -> None:
    task = Home(costs.devices(), costs.model(), tokens).task()
    assert tuple(int(capacity // task.need[0]) for capacity in task.capacity) == caps


def test_the_cache_takes_memory() -> None:
    shape = costs.model().shape
    without = Home(costs.devices(), costs.model(), 4096, 1000).task()
    with_cache = Home(costs.devices(), ModelCosts.of(shape), 4096, 1000).task()
    assert with_cache.need[0] - without.need[0] == 5096 * 4 * 8 * 128


def test_a_measured_link_takes_the_place_of_the_rates() -> None:
    one, other, *_ = costs.devices()
    links = {(one.name, other.name): Link(8e6, 0.5)}
    found = costs.sending((one, other), 1e6, links)
    assert found[0, 1] == pytest.approx(1.5)
    assert found[1, 0] == pytest.approx(8e6 / min(other.uplink, one.downlink))


def two(overlap: Overlap) -> Task:
    """Two layers for each of two devices: 1 s to load, 2 s to compute, 0.5 s to send."""
    task = uniform([1.0, 1.0], [2.0, 2.0], [3, 3], np.array([[0.0, 0.5], [0.5, 0.0]]), 4, overlap)
    return replace(task, step=np.full((2, 4), 0.1), hop=np.full((2, 2), 0.25))


@pytest.mark.parametrize(
    ("overlap", "first", "second"), [("paper", 6.0, 10.5), ("receiving", 6.0, 10.5), ("streamed", 5.0, 9.5)]
)
def test_the_three_ways_to_overlap(overlap: Overlap, first: float, second: float) -> None:
    spans = timeline(two(overlap), ((0, 2), (1, 2)))
    assert [span.finish_s for span in spans] == [first, second]
    assert spans[1].wait_s == first - spans[1].load_s  # eq. 24


def test_receiving_while_loading_saves_the_sending() -> None:
    slow = uniform([1.0, 4.0], [1.0, 1.0], [3, 3], np.full((2, 2), 0.5), 4)
    overlaps: tuple[Overlap, ...] = ("paper", "receiving")
    ends = {overlap: makespan(replace(slow, overlap=overlap), ((0, 2), (1, 2))) for overlap in overlaps}
    assert ends == {"paper": 8 + 0.5 + 2, "receiving": 8 + 2}


def test_streaming_computes_each_layer_once_it_is_there() -> None:
    each, together = np.ones(3, dtype=bool), np.array([True, False, True])
    assert streamed(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.5]), 3.0, each) == 3.5
    assert streamed(np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0]), 3.0, each) == 7.0
    assert streamed(np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0]), 3.0, together) == 8.0
    assert streamed(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.5]), 3.0, ~each) == 4.5


def test_a_token_goes_through_every_stage_and_back() -> None:
    assert per_token(two("paper"), ((0, 2), (1, 2))) == pytest.approx(4 * 0.1 + 2 * 0.25)
    assert per_token(two("paper"), ((0, 4),)) == pytest.approx(4 * 0.1)


def test_a_device_decodes_as_fast_as_it_reads_its_weights_where_that_is_known() -> None:
    one, *_ = costs.devices()
    known = replace(one, bandwidth=100e9)
    task = Home([one, known], costs.model(), 256, 10).task()
    assert task.step[1, 0] == pytest.approx(costs.model().shape.weights / 100e9)
    assert task.step[0, 0] == pytest.approx(costs.model().shape.flops(1, 261) / one.speed(1))


def test_what_fits() -> None:
    task = two("paper")
    assert fits(task, ((0, 2), (1, 2)))
    assert not fits(task, ((0, 4),))  # memory
    assert not fits(task, ((0, 2), (0, 2)))  # twice the same device
    assert not fits(task, ((0, 2), (1, 1)))  # a layer left


def test_a_tied_head_is_kept_once_on_a_device_that_holds_all() -> None:
    shape = TransformerShape(4, 64, 4, 2, 16, 128)
    tied = ModelCosts("tied", shape, (shape.weights,) * 4, (0.0,) * 4, embedding=1e6, head=1e6, tied=True)
    assert tied.bytes == pytest.approx(4 * shape.weights + 1e6)
    task = Home(costs.devices(), tied, 64).task()
    assert task.alone_load[0] == pytest.approx(tied.bytes / 5000e6)
    assert timeline(task, ((0, 4),))[0].load_s == pytest.approx(tied.bytes / 5000e6)


def test_without_a_device_there_is_nothing_to_plan_for() -> None:
    with pytest.raises(InvalidOption, match="no device"):
        Home((), costs.model(), 64)


# --- devices, as measured and as they are now -------------------------------------------------------------------------


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
    pieces = LayersOnDevice(frozenset(range(6)), pieces=(LayerRange(0, 3), LayerRange(3, 6)))
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
    assert found.peak * -math.expm1(-found.b * 64) == pytest.approx(-peak * math.expm1(-b * 64), rel=1e-2)


def test_errors_count_by_their_share() -> None:
    speeds = [-1e12 * math.expm1(-0.01 * t) * (1.1 if i % 2 else 0.9) for i, t in enumerate(TOKENS)]
    found = fit_utilisation(TOKENS, speeds)
    assert found.peak == pytest.approx(1e12, rel=0.1)
    assert 0.05 < found.worst < 0.2


def test_one_speed_is_met_exactly() -> None:
    found = fit_utilisation((4,), (5e9,))
    assert found.peak * -math.expm1(-found.b * 4) == pytest.approx(5e9)
    assert found.worst < 1e-9

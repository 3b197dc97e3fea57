"""CSGO's equations and its setting, number by number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.coldstart import costs
from edgellm.coldstart.costs import Link, ModelCosts, TransformerShape, sending
from edgellm.coldstart.home import Home
from edgellm.coldstart.problem import Overlap, Task, fits, makespan, per_token, streamed, timeline
from edgellm.errors import InvalidOption
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


def test_utilisation_saturates() -> None:
    device = costs.devices()[0]
    assert device.utilisation(0) == 0.0
    assert device.utilisation(1e9) == pytest.approx(0.4)
    assert device.speed(2048) == pytest.approx(165e12 * 0.4 * (1 - np.exp(-5.1e-4 * 2048)))


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
    found = sending((one, other), 1e6, links)
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
    assert [span.finish for span in spans] == [first, second]
    assert spans[1].wait == first - spans[1].load  # eq. 24


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
    assert timeline(task, ((0, 4),))[0].load == pytest.approx(tied.bytes / 5000e6)


def test_without_a_device_there_is_nothing_to_plan_for() -> None:
    with pytest.raises(InvalidOption, match="no device"):
        Home((), costs.model(), 64)

"""The best split over what the devices have, and what would have to be brought for a better one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device
from edgellm.coldstart.plan import MIN_SAVING, predict
from edgellm.errors import PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import check_shares
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.placement import DeviceCapability, Placement, place
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.workers import Worker

MODEL = ModelCosts.of(TransformerShape(12, 1024, 16, 4, 64, 4096), "a model")
ALL = frozenset(range(12))


def device(name: str, tflops: float = 1.0, memory: float = 4e9, disk: float = 2e8) -> Device:
    return Device(name, tflops * 1e12, 0.5, 0.01, disk, memory, 4e8, 4e8)


HOME = Fleet((device("here", 0.2), device("desk"), device("phone", 0.1)))
WORKERS = {
    "desk": Worker("desk", None, Address("127.0.0.1", 50151)),
    "phone": Worker("phone", None, Address("127.0.0.1", 50152)),
}


def placed(*able: DeviceCapability, home: Fleet = HOME, tokens_in: int = 512, tokens_out: int = 8) -> Placement:
    return place(MODEL, home, WORKERS, able, tokens_in=tokens_in, tokens_out=tokens_out)


def test_where_everything_lies_as_it_should_the_best_plan_is_run() -> None:
    found = placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL), DeviceCapability("phone", ALL))
    assert found.best is not None
    assert found.option == found.best.advised
    assert (found.lacking, found.advice("MODEL")) == ((), "")
    assert found.reason == found.best.advice


def test_what_has_to_be_moved_is_said_and_what_is_there_is_run() -> None:
    found = placed(DeviceCapability("here", ALL), DeviceCapability("desk", frozenset(range(6))))
    (lacking,) = found.lacking
    assert found.best is not None
    wanted = {stage.device: stage for stage in found.best.option.stages}["desk"]
    assert lacking.share == StageShare("desk", wanted.layers)
    assert lacking.layers == tuple(range(6, wanted.layers.stop))
    assert lacking.size == sum(MODEL.layer_bytes[6 : wanted.layers.stop])
    assert all(share.layers.last < 6 for share in found.shares if share.name == "desk")
    advice = found.advice("user/repo")
    first, last = lacking.share.layers.start + 1, lacking.share.layers.last + 1
    assert f"edgellm mesh deploy user/repo --split 127.0.0.1:50151:{first}-{last}" in advice
    assert f"desk {lacking.size / 1e6:,.0f} MB missing" in advice


def test_where_nobody_has_anything_this_device_is_used_alone() -> None:
    found = placed(
        DeviceCapability("here", ALL), DeviceCapability("desk", frozenset()), DeviceCapability("phone", frozenset())
    )
    assert found.shares == (StageShare("here", LayerRange(0, 12)),)
    assert dict(found.why())["desk"] == "it has no layers of the model"
    assert "deploy" in found.advice("MODEL")


def test_what_is_loaded_already_is_not_loaded_again() -> None:
    cold = placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL), tokens_in=16)
    warm = placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL, ALL), tokens_in=16)
    assert warm.shares == (StageShare("desk", LayerRange(0, 12)),)
    assert warm.option.ttft_s < cold.option.ttft_s / 2
    full = Fleet((HOME.devices[0], replace(HOME.devices[1], memory=2e6)))  # what is loaded takes no more
    assert (
        placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL, ALL), home=full, tokens_in=16).shares
        == warm.shares
    )
    assert placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL), home=full, tokens_in=16).shares == (
        StageShare("here", LayerRange(0, 12)),
    )


def test_a_worker_takes_no_more_than_it_gives() -> None:
    layer = MODEL.layer_bytes[0]
    found = placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL, memory=int(3.5 * layer)))
    assert [share.layers.last - share.layers.start < 3 for share in found.shares if share.name == "desk"] == [True]


def test_what_is_loaded_counts_in_what_a_worker_gives() -> None:
    layer, half = MODEL.layer_bytes[0], frozenset(range(6, 12))
    for gives, most in ((8.5, 8), (12.5, 12)):
        desk = DeviceCapability("desk", ALL, half, memory=int(gives * layer))
        found = placed(DeviceCapability("here", ALL), desk, tokens_in=16)
        assert sum(len(share.layers) for share in found.shares if share.name == "desk") <= most
        assert found.fleet.devices[1].memory == pytest.approx(gives * layer, abs=1.0)  # when it is planned anew


def test_where_the_layers_do_not_lie_where_they_fit_it_says_what_to_bring() -> None:
    small = Fleet((device("here", memory=5 * MODEL.layer_bytes[0]), device("desk", memory=9 * MODEL.layer_bytes[0])))
    with pytest.raises(PlanImpossible, match=r"desk has 2 of 12 .* edgellm mesh deploy MODEL --split 127"):
        placed(DeviceCapability("here", ALL), DeviceCapability("desk", frozenset({0, 1})), home=small)
    tiny = Fleet((device("here", memory=1e6), device("desk", memory=1e6)))
    with pytest.raises(PlanImpossible, match=r"the devices have 0\.0 GB"):
        placed(DeviceCapability("here", ALL), DeviceCapability("desk", frozenset({0, 1})), home=tiny)


def test_pieces_of_several_layers_are_not_cut_in_two() -> None:
    bounds = {"begins": frozenset({0, 5, 10}), "ends": frozenset({4, 9, 11})}
    low = Fleet((device("here", memory=8 * MODEL.layer_bytes[0]), device("desk")))
    found = placed(DeviceCapability("here", ALL), DeviceCapability("desk", ALL, **bounds), home=low)  # type: ignore[arg-type]
    share = next(share for share in found.shares if share.name == "desk")
    assert share.layers.start in bounds["begins"]
    assert share.layers.last in bounds["ends"]


@given(st.data())
@settings(max_examples=60)
def test_whatever_lies_where_only_that_is_used_and_nothing_that_is_there_is_faster(data: st.DataObject) -> None:
    """Against every split of two devices."""
    held = data.draw(st.frozensets(st.integers(0, 11)))
    warm = data.draw(st.frozensets(st.sampled_from(sorted(held)))) if held else frozenset()
    found = placed(DeviceCapability("here", ALL), DeviceCapability("desk", held, warm))
    check_shares(found.shares, 12, ["here", "desk"])
    for share in found.shares:
        if share.name == "desk":
            assert held.issuperset(share.layers)
    if warm:
        return
    least = [predict(HOME.devices, MODEL, ((0, 12),), 512, 8).ttft_s]
    for at in range(13):
        for order in ((0, 1), (1, 0)):
            cut = tuple((one, n) for one, n in zip(order, (at, 12 - at), strict=True) if n)
            spans = {order[0]: range(at), order[1]: range(at, 12)}
            if held.issuperset(spans[1]):
                least.append(predict(HOME.devices, MODEL, cut, 512, 8).ttft_s)
    assert found.option.ttft_s * (1.0 - MIN_SAVING) <= min(least) * (1.0 + 1e-6)

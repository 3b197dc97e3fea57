"""The best split over what the devices have, before a reply and after a loss, and what would have to be brought."""

from dataclasses import replace
from itertools import permutations
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.costs import Device, LayersOnDevice, ModelCosts, TransformerShape
from edgellm.coldstart.plan import predict
from edgellm.coldstart.problem import Fleet, Home, MemoryOverhead
from edgellm.errors import PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import check_shares
from edgellm.mesh.placement import Placement, fail_over, place, with_phases
from edgellm.rpc.address import Address
from edgellm.rpc.layers import Worker
from edgellm.rpc.link import Endpoint

MODEL = ModelCosts.of(TransformerShape(12, 1024, 16, 4, 64, 4096), "a model")
ALL = frozenset(range(12))
HELD = LayersOnDevice(ALL)


def device(name: str, tflops: float = 1.0, memory: float = 4e9, disk: float = 2e8) -> Device:
    return Device(name, tflops * 1e12, 0.5, 0.01, disk, memory, 4e8, 4e8)


HOME = Fleet((device("here", 0.2), device("desk"), device("phone", 0.1)))
WORKERS = {
    "desk": Worker("desk", None, Endpoint("desk", Address("127.0.0.1", 50151))),
    "phone": Worker("phone", None, Endpoint("phone", Address("127.0.0.1", 50152))),
}


def placed(home: Fleet = HOME, tokens_in: int = 512, tokens_out: int = 8, **holds: LayersOnDevice) -> Placement:
    """The placement on those devices of the home that hold such layers."""
    devices = tuple(replace(one, layers=holds[one.name]) for one in home.devices if one.name in holds)
    return place(Home(devices, MODEL, tokens_in, tokens_out, links=home.links), WORKERS)


def test_where_everything_lies_as_it_should_the_best_plan_is_run() -> None:
    found = placed(here=HELD, desk=HELD, phone=HELD)
    assert found.best is not None
    assert found.plan is found.best
    assert (found.lacking, found.advice("MODEL")) == ((), "")
    assert found.sentences == [found.best.advice]


def test_what_has_to_be_moved_is_said_and_what_is_there_is_run() -> None:
    found = placed(here=HELD, desk=LayersOnDevice(frozenset(range(6))))
    ((share, size),) = found.lacking
    assert found.best is not None
    wanted = {stage.device: stage for stage in found.best.option.stages}["desk"]
    assert share == StageShare("desk", wanted.layers)
    assert size == sum(MODEL.layer_bytes[6 : wanted.layers.stop])
    assert all(share.layers.last < 6 for share in found.shares if share.name == "desk")
    advice = found.advice("user/repo")
    assert f"edgellm mesh deploy user/repo --split 127.0.0.1:50151:{share.layers}" in advice
    assert f"desk {size / 1e6:,.0f} MB missing" in advice


def test_where_nobody_has_anything_this_device_is_used_alone() -> None:
    found = placed(here=HELD, desk=LayersOnDevice(frozenset()), phone=LayersOnDevice(frozenset()))
    assert found.shares == (StageShare("here", LayerRange(0, 12)),)
    assert dict(found.why())["desk"] == "it has no layers of the model"
    assert "deploy" in found.advice("MODEL")


def test_what_is_loaded_already_is_not_loaded_again_and_predicted_so() -> None:
    cold, warm = (placed(here=HELD, desk=LayersOnDevice(ALL, some), tokens_in=16) for some in (frozenset(), ALL))
    assert warm.shares == (StageShare("desk", LayerRange(0, 12)),)
    assert warm.plan.advised.ttft_s < cold.plan.advised.ttft_s / 2
    assert predict(warm.home, warm.home.cut(warm.shares)) == warm.plan.advised


def test_what_a_stage_needs_beside_its_layers_leaves_less_for_them() -> None:
    layer = MODEL.layer_bytes[0]
    home = Fleet((HOME.devices[0], replace(HOME.devices[1], memory=8.5 * layer)))
    devices = tuple(replace(one, layers=HELD) for one in home.devices)
    found = place(Home(devices, MODEL, 16, 8, overhead=MemoryOverhead(layer, 2.0 * layer)), WORKERS)
    assert [len(share.layers) for share in found.shares if share.name == "desk"] == [3]


def test_where_the_layers_do_not_lie_where_they_fit_it_says_what_to_bring() -> None:
    small = Fleet((device("here", memory=5 * MODEL.layer_bytes[0]), device("desk", memory=9 * MODEL.layer_bytes[0])))
    with pytest.raises(PlanImpossible, match=r"desk has 2 of 12 .* edgellm mesh deploy MODEL --split 127"):
        placed(here=HELD, desk=LayersOnDevice(frozenset({0, 1})), home=small)
    tiny = Fleet((device("here", memory=1e6), device("desk", memory=1e6)))
    with pytest.raises(PlanImpossible, match=r"the devices have 0\.0 GB"):
        placed(here=HELD, desk=LayersOnDevice(frozenset({0, 1})), home=tiny)


def test_no_plan_cuts_a_model_where_it_cannot_be_cut() -> None:
    begins = frozenset({0, 4, 8})
    model = replace(MODEL, begins=begins)
    low = Fleet((device("here", memory=7 * MODEL.layer_bytes[0]), device("desk", memory=9 * MODEL.layer_bytes[0])))
    for held in (ALL, frozenset(range(4, 12))):
        here, desk = (
            replace(one, layers=LayersOnDevice(some)) for one, some in zip(low.devices, (ALL, held), strict=True)
        )
        found = place(Home((here, desk), model, 16, 16))
        assert found.best is not None
        assert len(found.shares) == 2
        for share in (*found.shares, *found.best.option.shares):
            assert share.layers.start in begins
            assert share.layers.stop in {*begins, 12}


SLOW = Device("a", 1e11, 1.0, 0.05, 5e7, 2e10, 2e7, 2e7, 5e-3, 5e9)
SMALL = ModelCosts.of(TransformerShape(12, 896, 14, 2, 64, 4864), "small")
ALONE = [LayerRange(0, 12)]


def in_phases(tokens_out: int, objective: Literal["ttft", "reply"] = "ttft") -> Placement:
    """The placement for a reply on three alike devices with slow disks: together they load soonest, alone each writes
    soonest."""
    three = (SLOW, replace(SLOW, name="b"), replace(SLOW, name="c"))
    return with_phases(place(Home(three, SMALL, 8, tokens_out, objective)))


def test_a_reply_begins_where_its_first_token_comes_soonest_and_moves_once() -> None:
    for objective in ("ttft", "reply"):
        found = in_phases(256, objective)
        assert len(found.shares) == 3
        assert found.phases is not None
        assert [share.layers for share in found.phases.following] == ALONE
        assert "From token " in found.phases.sentence
        again = found.phases.predict(8, 256)
        assert again.seconds == pytest.approx(found.phases.reply.seconds)
        assert found.phases.predict(8, 64).seconds < again.seconds


def test_after_a_short_reply_the_model_still_moves_for_the_next_one() -> None:
    found = in_phases(4).phases
    assert found is not None
    assert found.sentence == ""
    assert [share.layers for share in found.following] == ALONE


EIGHT = 8
BIG = ModelCosts.of(TransformerShape(EIGHT, 4096, 32, 8, 128, 14336))


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A model in pieces, some of which are there: the first and the last layer of each."""
    ends = sorted(draw(st.sets(st.integers(0, EIGHT - 2))) | {EIGHT - 1})
    every = list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))
    return draw(st.lists(st.sampled_from(every), unique=True))


def holder(name: str, held: list[tuple[int, int]], hop: float) -> Device:
    layers = frozenset(layer for first, last in held for layer in range(first, last + 1))
    there = tuple(LayerRange(first, last + 1) for first, last in held)
    return replace(Device.unmeasured(name, LayersOnDevice(layers, pieces=there)), latency=hop)


def in_whole_pieces(held: list[tuple[int, int]], first: int, last: int) -> bool:
    """Whether pieces that are there make up these layers."""
    at = first
    for begin, end in sorted(held):
        if begin == at and end <= last:
            at = end + 1
    return at == last + 1


@given(st.lists(st.tuples(pieces(), st.floats(0.0, 0.1)), min_size=1, max_size=3))
@settings(max_examples=200)
def test_no_range_cuts_a_piece_and_none_is_missed(held: list[tuple[list[tuple[int, int]], float]]) -> None:
    devices = [holder("abc"[at], some, hop) for at, (some, hop) in enumerate(held)]
    found = fail_over(Home(devices, BIG, 1), devices)
    if found is None:
        assert not any(_possible(order, 0) for order in permutations([some for some, _ in held]))
        return
    check_shares(found, EIGHT, [device.name for device in devices])
    for share in found:
        assert in_whole_pieces(held["abc".index(share.name)][0], share.layers.start, share.layers.last)
        assert devices["abc".index(share.name)].layers.takes(share.layers)


def _possible(order: tuple[list[tuple[int, int]], ...], at: int) -> bool:
    """Whether these devices, in this order, some of them left out, can hold the layers from `at` on."""
    if at == EIGHT:
        return True
    if not order:
        return False
    ends = [end for end in range(at, EIGHT) if in_whole_pieces(order[0], at, end)]
    return _possible(order[1:], at) or any(_possible(order[1:], end + 1) for end in ends)

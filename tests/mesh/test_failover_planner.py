"""Who takes which layers, where devices hold pieces of several layers: a piece is never cut in two."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device, LayersOnDevice
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import check_shares
from edgellm.mesh.placement import fail_over

LAYERS = 8
MODEL = ModelCosts.of(TransformerShape(LAYERS, 4096, 32, 8, 128, 14336))


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A model in pieces, some of which are there: the first and the last layer of each."""
    ends = sorted(draw(st.sets(st.integers(0, LAYERS - 2))) | {LAYERS - 1})
    every = list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))
    return draw(st.lists(st.sampled_from(every), unique=True))


def device(name: str, held: list[tuple[int, int]], hop: float) -> Device:
    layers = frozenset(layer for first, last in held for layer in range(first, last + 1))
    begins, ends = frozenset(first for first, _ in held), frozenset(last for _, last in held)
    return replace(Device.unmeasured(name, LayersOnDevice(layers, begins=begins, ends=ends)), latency=hop)


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
    devices = [device("abc"[at], some, hop) for at, (some, hop) in enumerate(held)]
    found = fail_over(devices, MODEL)
    if found is None:
        assert not any(_possible(order, 0) for order in permutations([some for some, _ in held]))
        return
    check_shares(found, LAYERS, [device.name for device in devices])
    for share in found:
        assert in_whole_pieces(held["abc".index(share.name)][0], share.layers.start, share.layers.last)
        assert devices["abc".index(share.name)].layers.takes(share.layers)


def _possible(order: tuple[list[tuple[int, int]], ...], at: int) -> bool:
    """Whether these devices, in this order, some of them left out, can hold the layers from `at` on."""
    if at == LAYERS:
        return True
    if not order:
        return False
    ends = [end for end in range(at, LAYERS) if in_whole_pieces(order[0], at, end)]
    return _possible(order[1:], at) or any(_possible(order[1:], end + 1) for end in ends)


def test_who_does_not_say_may_begin_and_end_anywhere() -> None:
    old = Device.unmeasured("old", LayersOnDevice(frozenset(range(3, LAYERS))))
    found = fail_over([old, device("new", [(0, 3), (4, 7)], 0.01)], MODEL)
    assert found is not None
    assert found == (StageShare("new", LayerRange(0, 4)), StageShare("old", LayerRange(4, 8)))  # both load at once
    old = Device.unmeasured("old", LayersOnDevice(frozenset(range(4, LAYERS))))
    found = fail_over([old, device("new", [(0, 3), (4, 5)], 0.01)], MODEL)
    assert found is not None
    assert [share.name for share in found] == ["new", "old"]

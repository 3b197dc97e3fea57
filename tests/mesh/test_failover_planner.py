"""Who takes which layers, where devices hold pieces of several layers: a piece is never cut in two."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import check_shares
from edgellm.mesh.placement import DeviceCapability, fail_over

LAYERS = 8


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int]]:
    """A model in pieces, some of which are there: the first and the last layer of each."""
    ends = sorted(draw(st.sets(st.integers(0, LAYERS - 2))) | {LAYERS - 1})
    every = list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))
    return draw(st.lists(st.sampled_from(every), unique=True))


def capability(name: str, held: list[tuple[int, int]], hop: float) -> DeviceCapability:
    layers = frozenset(layer for first, last in held for layer in range(first, last + 1))
    begins, ends = frozenset(first for first, _ in held), frozenset(last for _, last in held)
    return DeviceCapability(name, layers, hop=hop, begins=begins, ends=ends)


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
    devices = [capability("abc"[at], some, hop) for at, (some, hop) in enumerate(held)]
    found = fail_over(devices, LAYERS)
    if found is None:
        assert not any(_possible(order, 0) for order in permutations([some for some, _ in held]))
        return
    check_shares(found, LAYERS, [device.name for device in devices])
    for share in found:
        assert in_whole_pieces(held["abc".index(share.name)][0], share.layers.start, share.layers.last)
        assert devices["abc".index(share.name)].takes(share.layers)


def _possible(order: tuple[list[tuple[int, int]], ...], at: int) -> bool:
    """Whether these devices, in this order, some of them left out, can hold the layers from `at` on."""
    if at == LAYERS:
        return True
    if not order:
        return False
    ends = [end for end in range(at, LAYERS) if in_whole_pieces(order[0], at, end)]
    return _possible(order[1:], at) or any(_possible(order[1:], end + 1) for end in ends)


def test_who_does_not_say_may_begin_and_end_anywhere() -> None:
    old = DeviceCapability("old", frozenset(range(3, LAYERS)))
    found = fail_over([old, capability("new", [(0, 3), (4, 7)], 0.01)], LAYERS)
    assert found is not None
    assert found == (StageShare("new", LayerRange(0, 4)), StageShare("old", LayerRange(4, 8)))  # both load at once
    old = DeviceCapability("old", frozenset(range(4, LAYERS)))
    found = fail_over([old, capability("new", [(0, 3), (4, 5)], 0.01)], LAYERS)
    assert found is not None
    assert [share.name for share in found] == ["new", "old"]

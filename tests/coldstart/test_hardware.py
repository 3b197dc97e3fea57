"""A device in a plan, as it was measured and as it is now."""

from __future__ import annotations

from dataclasses import replace

from edgellm.coldstart.hardware import Device, LayersOnDevice, devices
from edgellm.layer_range import LayerRange

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
    pieces = LayersOnDevice(frozenset(range(6)), begins=frozenset({0, 3}), ends=frozenset({2, 5}))
    assert pieces.takes(LayerRange(0, 3))
    assert pieces.takes(LayerRange(0, 6))
    assert not pieces.takes(LayerRange(1, 3))
    assert not pieces.takes(LayerRange(0, 4))
    assert not pieces.takes(LayerRange(3, 8))
    assert LayersOnDevice().takes(LayerRange(5, 99))

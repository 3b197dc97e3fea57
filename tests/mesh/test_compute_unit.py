"""What computes layers, with the reason, and the memory that is free there."""

from __future__ import annotations

import pytest

from edgellm import system
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware
from edgellm.errors import InvalidOption
from edgellm.mesh import weight_cache
from edgellm.mesh.weight_cache import ComputeUnit

GB = 10**9
CARD = ComputeDevice("CUDA0", "a card", "gpu", 8 * GB, 10 * GB)
SECOND = ComputeDevice("CUDA1", "another card", "gpu", 4 * GB, 4 * GB)
SHARED = ComputeDevice("Vulkan0", "an integrated card", "igpu", 100 * GB, 100 * GB)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[ComputeDevice]:
    found: list[ComputeDevice] = []
    monkeypatch.setattr(
        weight_cache, "offload_devices", lambda names: [card for card in found if not names or card.name in names]
    )
    monkeypatch.setattr(weight_cache, "free_memory", lambda: (50 * GB, "the machine's"))
    return found


def test_without_a_card_the_processor_computes(cards: list[ComputeDevice]) -> None:
    found = ComputeUnit.choose(Hardware(threads=2))
    assert (found.name, found.hardware) == ("", Hardware(gpu_layers=0, threads=2))
    assert "finds no graphics card" in found.reason
    assert found.available() == (50 * GB, "the machine's")
    assert found.description
    with pytest.raises(InvalidOption, match="finds no graphics card"):
        ComputeUnit.choose(Hardware(gpu_layers=ALL_LAYERS))


def test_cards_compute_unless_that_is_not_wanted(cards: list[ComputeDevice]) -> None:
    cards += [CARD, SHARED, SECOND]
    for layers in (None, ALL_LAYERS):
        found = ComputeUnit.choose(Hardware(gpu_layers=layers, cache_type="q8_0"))
        assert found.name == "CUDA0/CUDA1"  # as llama.cpp does, without the integrated one
        assert found.hardware == Hardware(ALL_LAYERS, ("CUDA0", "CUDA1"), cache_type="q8_0")
        assert found.description == "a card and another card"
    free, reason = found.available()
    assert free == 12 * GB - 2 * 512 * 2**20
    assert "CUDA0/CUDA1" in reason
    named = ComputeUnit.choose(Hardware(devices=("CUDA1",)))
    assert (named.name, named.reason) == ("CUDA1", "--device names it")
    assert ComputeUnit.choose(Hardware(gpu_layers=0)).name == ""
    with pytest.raises(InvalidOption, match="--gpu-layers is 3"):
        ComputeUnit.choose(Hardware(gpu_layers=3))


def test_a_card_that_shares_the_memory_has_no_more_than_there_is(cards: list[ComputeDevice]) -> None:
    cards.append(SHARED)
    found = ComputeUnit.choose(Hardware())
    assert found.name == "Vulkan0"
    assert found.available() == (50 * GB, "the machine's")
    cards[:] = [ComputeDevice("RPC0", "a card that does not say", "gpu", 0, 0)]
    assert ComputeUnit.choose(Hardware()).available() == (50 * GB, "the machine's")


def test_a_tenth_of_the_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: (10 * GB, "the machine's free memory"))
    assert ComputeUnit().available() == (9 * GB, "the machine's free memory, less a tenth")

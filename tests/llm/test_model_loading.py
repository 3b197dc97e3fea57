"""Where a draft model goes: to the fastest place that was measured, or as llama.cpp's reckoning says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import time

import pytest

from edgellm.engine import ModelFile, memory_fit
from edgellm.engine import hardware as hardware_module
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware, placement
from edgellm.engine.memory_fit import MemoryUse
from edgellm.llm import model_loading
from edgellm.llm.cost_curves import StoredCurve, _device, curve_path, write_curve
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.model_loading import measure_elsewhere, place_draft
from edgellm.storage.fingerprint import FileHash, fingerprint

SIZE = 10**9
CARDS = [ComputeDevice(f"Card{n}", "a card", "gpu", 8 * SIZE, 8 * SIZE) for n in range(2)]
AUTO, PROCESSOR = Hardware(), Hardware(gpu_layers=0)
EVERY, FIRST, SECOND = (Hardware(gpu_layers=ALL_LAYERS, devices=names) for names in ((), ("Card0",), ("Card1",)))


@pytest.fixture
def cards(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphics cards, as llama.cpp would list them; a model takes a gigabyte of the first that it may use."""

    def listed(names: tuple[str, ...] = ()) -> list[ComputeDevice]:
        return [card for card in CARDS if not names or card.name in names]

    def reckoned(_file: ModelFile, hardware: Hardware, *_: object) -> MemoryUse:
        device = listed(hardware.devices)[0].name if hardware.gpu_layers else "CPU"
        return MemoryUse(Counter({device: SIZE}), Counter(), Counter())

    for module in (memory_fit, hardware_module, model_loading):
        monkeypatch.setattr(module, "offload_devices", listed)
    monkeypatch.setattr(memory_fit, "reckon", reckoned)


def measured(path: Path, hardware: Hardware, seconds: float) -> None:
    curve = StoredCurve((1, 2), (seconds, 1.5 * seconds), 0.0, (), time(), _device(), (0.0, 0.0))
    write_curve(curve_path(fingerprint(path), 1, placement(hardware)), curve)


@pytest.mark.usefixtures("cards")
def test_unmeasured_it_goes_on_the_cards_and_is_measured_elsewhere(draft_path: Path) -> None:
    taken = Counter[str]()
    found = place_draft(str(draft_path), AUTO, taken, 1)
    assert found.placed.hardware.gpu_layers == ALL_LAYERS
    assert taken == {"Card0": SIZE}
    assert [(one.gpu_layers, one.devices) for one in found.unmeasured] == [
        (0, ()), (ALL_LAYERS, ("Card0",)), (ALL_LAYERS, ("Card1",)),
    ]  # fmt: skip


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("times", "best", "uses"),
    [
        ({EVERY: 0.004, PROCESSOR: 0.003}, PROCESSOR, "CPU"),
        ({EVERY: 0.003, PROCESSOR: 0.004}, EVERY, "Card0"),
        ({EVERY: 0.004, FIRST: 0.003, SECOND: 0.002, PROCESSOR: 0.009}, SECOND, "Card1"),
    ],
)
def test_it_goes_where_a_token_was_measured_to_take_least(
    draft_path: Path, times: dict[Hardware, float], best: Hardware, uses: str
) -> None:
    for hardware, seconds in times.items():
        measured(draft_path, hardware, seconds)
    taken = Counter({"Card0": SIZE})  # the verifier
    found = place_draft(str(draft_path), AUTO, taken, 1)
    assert (found.placed.hardware.gpu_layers, found.placed.hardware.devices) == (best.gpu_layers, best.devices)
    assert set(taken) == {"Card0", uses}
    assert taken["Card0"] == (2 if uses == "Card0" else 1) * SIZE
    assert all(f"{1e3 * seconds:.1f} ms" in found.placed.reason for seconds in times.values())


@pytest.mark.usefixtures("cards")
def test_what_the_user_says_is_not_compared(draft_path: Path) -> None:
    measured(draft_path, EVERY, 0.004)
    measured(draft_path, PROCESSOR, 0.003)
    found = place_draft(str(draft_path), EVERY, Counter(), 1)
    assert found.placed.hardware.gpu_layers == ALL_LAYERS
    assert not found.unmeasured


@pytest.mark.usefixtures("home")
def test_what_is_unmeasured_is_measured_while_nothing_else_is_done(draft_path: Path) -> None:
    file_hash = FileHash(draft_path)
    file_hash.compute()
    placed = place_draft(str(draft_path), PROCESSOR, Counter(), 1).placed
    idle = IdleWork()
    measure_elsewhere(model_loading.DraftPlacement(placed, (PROCESSOR,)), 1, idle)
    path = curve_path(file_hash.compute(), 1)
    waiting = idle._thread
    if waiting is not None:
        waiting.join()
    assert path.exists()
    idle.close()

"""A device measures itself, keeps what it found, and knows when that no longer holds."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from edgellm import system
from edgellm.engine import ModelFile
from edgellm.engine.gguf import synthetic_layers as timing
from edgellm.engine.gguf.synthetic_layers import Blocks, blocks_of
from edgellm.engine.hardware import ComputeDevice, Hardware
from edgellm.errors import MeasureFailed
from edgellm.mesh import device_profiler, weight_cache
from edgellm.mesh.device_profiler import measure_device
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.layers.measuring import DeviceFigures
from edgellm.storage import device_speed
from edgellm.storage.device_speed import cold_read
from testkit.gguf.random_model import Shape, write

ONE = ComputeUnit(Hardware(threads=1))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgellm.storage.device_speed.MIN_SECONDS", 0.01)
    monkeypatch.setattr(timing, "ROWS", (1, 4))
    monkeypatch.setattr(timing, "_SPELL", 0.0)
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    write(tmp_path / "tiny.gguf", Shape("llama", 300, 3, 64, 2, 1, 96, 64), "Q8_0")
    return blocks_of(ModelFile.open(tmp_path / "tiny.gguf"))


def test_it_is_measured_once_and_when_asked(blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doing: list[str] = []
    first = measure_device(blocks, on_progress=doing.append, folder=tmp_path / "layers", unit=ONE)
    assert first.reason == "never measured with such layers"
    assert (first.rows, first.block, first.layer, first.threads) == ((1, 4), blocks.key, blocks.layer, 1)
    assert first.disk > 0
    assert first.memory > 0
    assert doing[0] == "writing layers of random weights"
    assert "reading them from disk" in doing
    assert not list((tmp_path / "layers").glob("*.gguf"))
    again = measure_device(blocks, unit=ONE)
    assert replace(again, memory=0) == replace(first, memory=0)
    assert measure_device(blocks, max_age=0.0, unit=ONE).reason == "asked for"
    with monkeypatch.context() as patch:
        patch.setattr(system, "processor", lambda: "another")
        assert measure_device(blocks, unit=ONE).reason.startswith("the processor was")
    assert measure_device(blocks, unit=ONE).reason == "the processor was another"
    with monkeypatch.context() as patch:
        patch.setattr(device_profiler, "program_version", lambda: "99")
        assert measure_device(blocks, unit=ONE).reason.startswith("measured by edgellm")
    assert measure_device(blocks, unit=ONE).reason == "measured by edgellm 99"
    with monkeypatch.context() as patch:
        now = time.time()
        patch.setattr("edgellm.mesh.device_profiler.time.time", lambda: now + 40 * 86_400)
        assert measure_device(blocks, unit=ONE).reason == "40 days old"
    assert measure_device(blocks, unit=ONE).reason.endswith("days old")  # a clock that was set back
    (kept,) = (tmp_path / "home").rglob("figures/*.json")
    kept.write_text("{")
    assert measure_device(blocks, unit=ONE).reason == "never measured with such layers"


def test_what_cannot_be_measured_is_said(blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasureFailed, match="Nothing can be measured in"):
        measure_device(blocks, folder=tmp_path / "file", unit=ONE)
    with pytest.raises(MeasureFailed, match="cannot be measured here"):
        measure_device(replace(blocks, data=100), folder=tmp_path, unit=ONE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(device_profiler, "write_random", full)
    with pytest.raises(MeasureFailed, match="No space left"):
        measure_device(blocks, folder=tmp_path, unit=ONE)


def test_figures_that_are_none_are_not_believed(blocks: Blocks, tmp_path: Path) -> None:
    from edgellm.errors import ProtocolError

    good = measure_device(blocks, folder=tmp_path, unit=ONE)
    bad: tuple[dict[str, Any], ...] = (
        {"rows": ()}, {"rows": (1,)}, {"seconds": (1.0, float("nan"))}, {"seconds": (0.0, 1.0)}, {"disk": 0.0},
        {"disk": float("inf")}, {"layer": 0}, {"memory": -1}, {"rows": (0, 1)},
    )  # fmt: skip
    for change in bad:
        with pytest.raises(ProtocolError):
            replace(good, **change)
    assert isinstance(good, DeviceFigures)


def test_a_cold_read_drops_the_pages_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * 2**20 + 5))
    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _handle, _at, _size, advice: dropped.append(advice), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_RANDOM", 1, raising=False)
    monkeypatch.setattr(device_speed, "MIN_SECONDS", 1e-9)
    speed, how = cold_read(path)
    assert speed > 0
    assert how.startswith("3 MB read")
    assert dropped == [os.POSIX_FADV_RANDOM, 4, 4]
    monkeypatch.setattr(device_speed, "MIN_SECONDS", 10.0)
    monkeypatch.setattr(device_speed, "MAX_BYTES", 5 * 2**20)  # a small file is read again
    assert cold_read(path)[1].startswith("5 MB read")
    assert len(dropped) == 7


CARD = ComputeUnit(Hardware(threads=1), "Card0", "a test says so")


def test_what_was_measured_elsewhere_is_not_used(
    blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a card and of the processor are kept apart, and those of a card that was replaced are left."""
    cards = [ComputeDevice("Card0", "a card", "gpu", 10**9, 10**9)]
    monkeypatch.setattr(weight_cache, "offload_devices", lambda _names: cards)
    own = measure_device(blocks, folder=tmp_path, unit=ONE)
    card = measure_device(blocks, folder=tmp_path, unit=CARD)
    assert card.reason == "never measured with such layers"
    assert (own.unit, card.unit, card.processor, card.unit_reason) == ("", "Card0", "a card", "a test says so")
    assert card.memory == 10**9 - 512 * 2**20
    assert "Card0" in card.memory_reason
    assert len(list((tmp_path / "home").rglob("figures/*.json"))) == 2
    assert measure_device(blocks, folder=tmp_path, unit=ONE).seconds == own.seconds
    assert measure_device(blocks, folder=tmp_path, unit=CARD).seconds == card.seconds
    cards[:] = [replace(cards[0], description="a faster card")]
    assert measure_device(blocks, folder=tmp_path, unit=CARD).reason == "the processor was a card"


def test_where_loading_is_slower_than_reading_that_is_what_counts(
    blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_profiler, "cold_read", lambda _path: (1e12, "all at once"))
    found = measure_device(blocks, folder=tmp_path / "layers", unit=ONE)
    assert found.disk < 1e11
    assert found.disk_reason.startswith("all at once: 1000000 MB/s; 2 layers loaded")
    assert not list((tmp_path / "layers").glob("*.gguf"))
    monkeypatch.setattr(device_profiler, "cold_read", lambda _path: (1.0, "drop by drop"))
    found = measure_device(blocks, max_age=0.0, folder=tmp_path / "layers", unit=ONE)
    assert (found.disk, found.disk_reason) == (1.0, "drop by drop")


@pytest.mark.parametrize("factor", [300.0, 1.0 / 300.0])
def test_a_kept_figure_that_no_device_can_have_is_measured_again(blocks: Blocks, tmp_path: Path, factor: float) -> None:
    first = measure_device(blocks, folder=tmp_path, unit=ONE)
    (kept,) = (tmp_path / "home").rglob("figures/*.json")
    found = json.loads(kept.read_text())
    kept.write_text(
        json.dumps({**found, "waited": 0.0, "seconds": [found["seconds"][0], factor * found["seconds"][1]]})
    )
    again = measure_device(blocks, folder=tmp_path, unit=ONE)
    assert again.reason == "the times are not plausible for any device"
    assert again.seconds[1] < 20.0 * first.seconds[1]


class Rested(FileIO):
    """A file whose first eight megabytes come at once, and the others at 40 MB/s."""

    clock = 0.0

    def readinto(self, room: Any) -> int:
        before = self.tell()
        n = super().readinto(room)
        slow = max(0, before + n - 8 * 2**20) - max(0, before - 8 * 2**20)
        Rested.clock += 1e-3 + slow / 40e6
        return n


@pytest.mark.parametrize("megabytes", [24, 100])
def test_a_disk_that_has_rested_is_not_taken_for_a_faster_one(
    megabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(megabytes * 2**20)
    monkeypatch.setattr(device_speed, "MIN_SECONDS", 1.0)
    monkeypatch.setattr(device_speed, "perf_counter", lambda: Rested.clock)
    monkeypatch.setattr(Path, "open", lambda self, *_, **__: Rested(self))
    assert 35e6 < cold_read(path)[0] < 42e6

"""Devices measure themselves and their lines, keep what they found, and know when that no longer holds."""

import errno
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm import system
from edgellm.engine import ModelFile
from edgellm.engine.cores import CpuWait
from edgellm.engine.gguf import synthetic_layers as timing
from edgellm.engine.gguf.synthetic_layers import Blocks, blocks_of
from edgellm.engine.hardware import ComputeDevice, Hardware
from edgellm.errors import MeasureFailed, VerifierUnreachable
from edgellm.layer_range import HERE
from edgellm.mesh import device_profiler, weight_cache
from edgellm.mesh.device_profiler import MAX_DOUBTFUL_AGE, measure_device
from edgellm.mesh.fleet_profiler import Survey, TimedModel, survey
from edgellm.mesh.placement import model_costs
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.layers import Worker, find_workers
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.storage.layer_store import LayerStore
from testkit.gguf.random_model import Shape, write
from tests.cli.conftest import quick_figures
from tests.rpc.layering import device_taking
from tests.rpc.strangers import befriend, device

__all__ = ["quick_figures"]

ONE = ComputeUnit(Hardware(threads=1))


@pytest.fixture(autouse=True)
def _quick(quick_figures: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "ROWS", (1, 4))
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def blocks(tmp_path: Path) -> Blocks:
    write(tmp_path / "tiny.gguf", Shape("llama", 300, 3, 64, 2, 1, 96, 64), "Q8_0")
    return blocks_of(ModelFile.open(tmp_path / "tiny.gguf"))


def test_it_is_measured_once_and_when_asked(blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doing, dropped = list[str](), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(system, "drop_pages", dropped.append)
        first = measure_device(blocks, on_progress=doing.append, folder=tmp_path / "layers", unit=ONE)
    assert len(dropped) >= 4, "the disk is timed by loading layers that are not in memory"
    assert first.reason == "never measured with such layers"
    assert (first.rows, first.block, first.layer) == ((1, 4), blocks.key, blocks.layer)
    assert 0.0 < first.disk < 1e11
    assert first.memory > 0
    assert doing[0] == "writing layers of random weights"
    assert "loading them from disk" in doing
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


CARD = ComputeUnit(Hardware(threads=1), "Card0", "a test says so")


def test_figures_of_elsewhere_are_not_used(blocks: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a card and of the processor are kept apart, and those of a card that was replaced are left."""
    cards = [ComputeDevice("Card0", "a card", "gpu", 10**9, 10**9)]
    monkeypatch.setattr(weight_cache, "offload_devices", lambda _names: cards)
    own = measure_device(blocks, folder=tmp_path, unit=ONE)
    card = measure_device(blocks, folder=tmp_path, unit=CARD)
    assert card.reason == "never measured with such layers"
    assert (own.unit, card.unit, card.processor, card.unit_reason) == ("", "Card0", "a card", "a test says so")
    assert card.memory == 10**9 - 512 * 2**20
    assert len(list((tmp_path / "home").rglob("figures/*.json"))) == 2
    assert measure_device(blocks, folder=tmp_path, unit=ONE).seconds == own.seconds
    assert measure_device(blocks, folder=tmp_path, unit=CARD).seconds == card.seconds
    cards[:] = [replace(cards[0], description="a faster card")]
    assert measure_device(blocks, folder=tmp_path, unit=CARD).reason == "the processor was a card"


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


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Trust]:
    """Paired with a desk, a phone and an attic."""
    trust = device(tmp_path / "owner")
    desk, phone, attic = (device(tmp_path / name) for name in ("desk", "phone", "attic"))
    with ExitStack() as running:
        for name, worker in (("desk", desk), ("phone", phone), ("attic", attic)):
            befriend(worker, trust, "files compute", name)
            store = LayerStore(tmp_path / name / "layers", 10**9)
            address = running.enter_context(device_taking(store, worker, measurer=measure_device))
            trust.peers.record_seen(worker.identity.id, address)
        yield trust


def found(owner: Trust) -> list[Worker]:
    return find_workers(owner, owner.peers.all(), [])


@pytest.fixture
def model(verifier_path: Path) -> TimedModel:
    file = ModelFile.open(verifier_path)
    return TimedModel(blocks_of(file), "verifier", model_costs(file).shape)


def look(owner: Trust, model: TimedModel, fresh: bool = False) -> tuple[Survey, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    return survey(found(owner), model, remeasure=fresh, notify=lambda *told: heard.append(told)), heard


def test_the_home_is_measured_once(owner: Trust, model: TimedModel) -> None:
    first, heard = look(owner, model)
    assert list(first.speeds) == [HERE, "attic", "desk", "phone"]
    assert list(first.lines) == ["attic", "desk", "phone"]
    assert first.left_out == ()
    assert ("desk", "measuring the connection from here") in heard
    fleet = first.fleet()
    assert [one.name for one in fleet.devices] == [HERE, "attic", "desk", "phone"]
    desk = fleet.devices[2]
    figures = first.speeds["desk"].figures
    assert desk.bandwidth == pytest.approx(model.blocks.layer / figures.seconds[0])
    assert (desk.disk, desk.memory, desk.util_a) == (figures.disk, figures.memory, 1.0)
    assert desk.uplink == first.lines["desk"].line.down
    again, heard = look(owner, model)
    assert again.lines == first.lines
    assert not [what for _, what in heard if what.startswith("measuring the connection from")]
    assert not [what for _, what in heard if what.startswith("computing")]
    fresh, heard = look(owner, model, fresh=True)
    assert ("desk", "measuring the connection from here") in heard
    assert fresh.speeds["desk"].figures.reason == "asked for"


def test_who_cannot_be_measured_is_left_out_with_the_reason(owner: Trust, model: TimedModel) -> None:
    attic, desk, phone = found(owner)
    weak = Worker(phone.name, phone.peer, phone.endpoint, phone.facts, frozenset({Right.FILES}))
    gone = Worker("gone", None, error=VerifierUnreachable("Nobody is there.", "Switch it on."))
    called_here = Worker(HERE, attic.peer, attic.endpoint, attic.facts, attic.rights)
    done = survey([desk, weak, gone, called_here], model)
    assert list(done.speeds) == [HERE, "desk"]
    said = {name: str(error) for name, error in done.left_out}
    assert "peers grant NAME compute" in said["phone"]
    assert said["gone"].startswith("Nobody")
    assert "Rename the other" in said[HERE]
    alone = survey([], model)
    assert list(alone.speeds) == [HERE]
    assert time.time() - alone.speeds[HERE].figures.taken < 60


def test_figures_of_a_busy_machine_are_doubtful_and_short_lived(
    owner: Trust, model: TimedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWait, "share", lambda _self: 0.6)
    first, _ = look(owner, model)
    said = first.doubts()
    assert any(one.startswith("desk: measured while the machine was busy (60%") for one in said)
    monkeypatch.setattr(CpuWait, "share", lambda _self: 0.0)
    assert look(owner, model)[0].doubts() == said
    now = time.time()
    monkeypatch.setattr("edgellm.mesh.device_profiler.time.time", lambda: now + MAX_DOUBTFUL_AGE + 60.0)
    again, _ = look(owner, model)
    assert again.doubts() == []
    assert (first.lines["desk"].busy, again.lines["desk"].busy) == (True, False)
    assert again.speeds["desk"].figures.reason.startswith("measured while the machine was busy")

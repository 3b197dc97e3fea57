"""The home's devices, measured, as the planner wants them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.coldstart.home import Home
from edgellm.coldstart.plan import PlanOption, plan
from edgellm.engine import ModelFile
from edgellm.engine.gguf import synthetic_layers as timing
from edgellm.engine.gguf.synthetic_layers import Blocks, blocks_of
from edgellm.engine.timing import CpuWait
from edgellm.errors import VerifierUnreachable
from edgellm.layer_range import HERE
from edgellm.llm.mesh_timeline import disproved_figures
from edgellm.mesh.device_profiler import measure_device
from edgellm.mesh.fleet_profiler import Survey, TimedModel, stored_link, stored_speed, survey
from edgellm.mesh.model_costs import model_costs
from edgellm.rpc.discovery.workers import Worker, find_workers
from edgellm.rpc.layers import measuring
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.storage.device_speed import MAX_DOUBTFUL_AGE
from edgellm.storage.layers.store import LayerStore
from tests.rpc.layering import device_taking
from tests.rpc.strangers import befriend, device


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgellm.storage.device_speed.MIN_SECONDS", 0.01)
    monkeypatch.setattr(timing, "ROWS", (1, 4, 16))
    monkeypatch.setattr(timing, "_SPELL", 0.0)
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Trust]:
    """Paired with a desk and a phone, which are paired with each other, and with an attic that nobody else knows."""
    trust = device(tmp_path / "owner")
    desk, phone, attic = (device(tmp_path / name) for name in ("desk", "phone", "attic"))
    befriend(desk, phone, "compute")
    befriend(phone, desk, "compute")
    with ExitStack() as running:
        for name, worker in (("desk", desk), ("phone", phone), ("attic", attic)):
            befriend(worker, trust, "files compute")
            trust.peers.rename(worker.identity.id, name)
            store = LayerStore(tmp_path / name / "layers", 10**9)
            address = running.enter_context(device_taking(store, worker, measurer=measure_device))
            trust.peers.record_seen(worker.identity.id, address)
        yield trust


def found(owner: Trust) -> list[Worker]:
    return find_workers(owner, owner.peers.all(), [])


@pytest.fixture
def blocks(verifier_path: Path) -> Blocks:
    return blocks_of(ModelFile.open(verifier_path))


def look(owner: Trust, blocks: Blocks, model: Path, fresh: bool = False) -> tuple[Survey, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    done = survey(
        owner, found(owner), timed(blocks, model), remeasure=fresh, notify=lambda who, what: heard.append((who, what))
    )
    return done, heard


def timed(blocks: Blocks, model: Path) -> TimedModel:
    return TimedModel(blocks, "verifier", model_costs(ModelFile.open(model)).shape)


def test_the_home_is_measured_once_and_planned_for(owner: Trust, blocks: Blocks, verifier_path: Path) -> None:
    first, heard = look(owner, blocks, verifier_path)
    assert list(first.speeds) == [HERE, "attic", "desk", "phone"]
    assert set(first.lines) == {(HERE, "attic"), (HERE, "desk"), (HERE, "phone"), ("desk", "phone")}
    assert first.left_out == ()
    assert ("desk", "measuring the connection from here") in heard
    assert all(kept.reason == "never measured" for kept in first.lines.values())
    fleet = first.fleet()
    assert [one.name for one in fleet.devices] == [HERE, "attic", "desk", "phone"]
    desk = fleet.devices[2]
    figures = first.speeds["desk"].figures
    assert desk.bandwidth == pytest.approx(blocks.layer / figures.seconds[0])
    assert (desk.disk, desk.memory, desk.util_a) == (figures.disk, figures.memory, 1.0)
    assert desk.uplink == first.lines[HERE, "desk"].line.down
    assert fleet.links["desk", "phone"].rate == first.lines["desk", "phone"].line.up
    assert fleet.links["phone", "desk"].rate == first.lines["desk", "phone"].line.down
    assert ("desk", "attic") not in fleet.links
    best = plan(Home(fleet.devices, model_costs(ModelFile.open(verifier_path)), 64, 16, links=fleet.links))
    assert best.option.stages[-1].layers.stop == 12

    again, heard = look(owner, blocks, verifier_path)
    assert again.lines == first.lines
    assert not [what for _, what in heard if what.startswith("measuring the connection from")]
    assert not [what for _, what in heard if what.startswith("computing")]
    fresh, heard = look(owner, blocks, verifier_path, fresh=True)
    assert all(kept.reason == "asked for" for kept in fresh.lines.values())
    assert fresh.speeds["desk"].figures.reason == "asked for"
    assert ("desk", "measuring the connection to phone") in heard


def test_what_was_measured_is_known_later_and_of_damage_nothing(
    owner: Trust, blocks: Blocks, verifier_path: Path, tmp_path: Path
) -> None:
    worker = found(owner)[1]
    assert stored_speed(worker) is None
    assert stored_link(worker) is None
    done, _ = look(owner, blocks, verifier_path)
    speed, line = stored_speed(worker), stored_link(worker)
    assert speed is not None
    assert speed.figures == done.speeds["desk"].figures
    assert speed.model == "verifier"
    assert speed.utilisation.peak > 0
    assert line == done.lines[HERE, "desk"]
    assert stored_speed(None) is not None
    for path in (tmp_path / "home").rglob("figures/*.json"):
        path.write_text("[{}]")
    assert stored_speed(worker) is None
    assert stored_link(worker) is None


def test_who_cannot_be_measured_is_left_out_and_it_is_said_why(
    owner: Trust, blocks: Blocks, verifier_path: Path
) -> None:
    attic, desk, phone = found(owner)
    weak = Worker(phone.name, phone.peer, phone.address, phone.facts, frozenset({Right.FILES}))
    gone = Worker("gone", None, error=VerifierUnreachable("Nobody is there.", "Switch it on."))
    called_here = Worker(HERE, attic.peer, attic.address, attic.facts, attic.rights)
    model = timed(blocks, verifier_path)
    done = survey(owner, [desk, weak, gone, called_here], model)
    assert list(done.speeds) == [HERE, "desk"]
    said = {name: str(error) for name, error in done.left_out}
    assert "peers grant NAME compute" in said["phone"]
    assert said["gone"].startswith("Nobody")
    assert "Rename the other" in said[HERE]
    alone = survey(owner, [], model)
    assert list(alone.speeds) == [HERE]
    assert time.time() - alone.speeds[HERE].figures.taken < 60


def test_figures_that_a_reply_has_disproved_are_measured_again_once(
    owner: Trust, blocks: Blocks, verifier_path: Path
) -> None:
    first, _ = look(owner, blocks, verifier_path)
    desk = first.workers["desk"]
    home = Home(first.fleet().devices, model_costs(ModelFile.open(verifier_path)), 64, 16, links=first.fleet().links)
    planned = plan(home).option.stages[0]
    planned = replace(planned, device="desk", compute_s=1.0, load_s=1.0, network_s=1.0)
    way = PlanOption((replace(planned, compute_s=300.0, load_s=2.0, network_s=1.0 / 300.0),), 1.0, 1.0, 1.0)
    told = disproved_figures(way, PlanOption((planned,), 1.0, 1.0, 1.0), {"desk": desk})
    assert [sentence.split(" took ")[0] for sentence in told] == ["desk: computing", "desk: network"]
    again, _ = look(owner, blocks, verifier_path)
    assert again.speeds["desk"].figures.reason == "asked for"
    assert again.lines[HERE, "desk"].reason == "a reply took a different time"
    assert again.lines[HERE, "attic"] == first.lines[HERE, "attic"]
    assert again.speeds["attic"].figures.taken == first.speeds["attic"].figures.taken
    assert (
        disproved_figures(way, PlanOption((planned,), 1.0, 1.0, 1.0), {"desk": desk}) == ()
    )  # it is the planner's model, then
    third, heard = look(owner, blocks, verifier_path)
    assert third.lines == again.lines
    assert not [what for _, what in heard if what == "measuring the connection from here"]


def test_figures_of_a_busy_machine_are_doubtful_and_short_lived(
    owner: Trust, blocks: Blocks, verifier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWait, "share", lambda _self: 0.6)
    first, _ = look(owner, blocks, verifier_path)
    said = first.doubts()
    assert any(one.startswith("The figures of desk are doubtful: measured while the machine was") for one in said)
    assert "The connection from here to desk was measured while this machine was busy." in said
    assert said[-1].startswith("Run again with --measure")
    monkeypatch.setattr(CpuWait, "share", lambda _self: 0.0)
    assert look(owner, blocks, verifier_path)[0].doubts() == said
    now = time.time()
    monkeypatch.setattr("edgellm.mesh.device_profiler.time.time", lambda: now + MAX_DOUBTFUL_AGE + 60.0)
    again, _ = look(owner, blocks, verifier_path)
    assert again.doubts() == []
    assert again.speeds["desk"].figures.reason.startswith("measured while the machine was busy")

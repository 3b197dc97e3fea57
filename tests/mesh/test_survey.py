"""The home's devices, measured, as the planner wants them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.coldstart.plan import plan
from edgellm.engine import blocks as timing
from edgellm.engine.blocks import Blocks, blocks_of
from edgellm.errors import VerifierUnreachable
from edgellm.link import flow
from edgellm.link.rights import Right
from edgellm.link.trust import Trust
from edgellm.link.workers import Worker, find_workers
from edgellm.mesh import survey as surveying
from edgellm.mesh.layers import model_of
from edgellm.mesh.measure import figures_here
from edgellm.mesh.split import HERE
from edgellm.mesh.survey import Survey, known_line, known_speed, survey
from edgellm.store.layers import LayerStore
from tests.link.layering import device_taking
from tests.link.strangers import befriend, device


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgellm.store.disk.LEAST_SECONDS", 0.01)
    monkeypatch.setattr(timing, "ROWS", (1, 4, 16))
    monkeypatch.setattr(timing, "_SPELL", 0.0)
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    monkeypatch.setattr(flow, "SECONDS", 0.02)
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
            address = running.enter_context(device_taking(store, worker, measurer=figures_here))
            trust.peers.saw(worker.identity.id, address)
        yield trust


def found(owner: Trust) -> list[Worker]:
    return find_workers(owner, owner.peers.all(), [])


@pytest.fixture
def blocks(verifier_path: Path) -> Blocks:
    return blocks_of(verifier_path)


def look(owner: Trust, blocks: Blocks, model: Path, fresh: bool = False) -> tuple[Survey, list[tuple[str, str]]]:
    heard: list[tuple[str, str]] = []
    shape = model_of(model).shape
    done = survey(
        owner, found(owner), blocks, "verifier", shape, fresh=fresh, tell=lambda who, what: heard.append((who, what))
    )
    return done, heard


def test_the_home_is_measured_once_and_planned_for(owner: Trust, blocks: Blocks, verifier_path: Path) -> None:
    first, heard = look(owner, blocks, verifier_path)
    assert list(first.speeds) == [HERE, "attic", "desk", "phone"]
    assert set(first.lines) == {(HERE, "attic"), (HERE, "desk"), (HERE, "phone"), ("desk", "phone")}
    assert first.left_out == ()
    assert ("desk", "the line from here") in heard
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
    best = plan(fleet.devices, model_of(verifier_path), 64, 16, links=fleet.links)
    assert best.way.stages[-1].last_layer == 12

    again, heard = look(owner, blocks, verifier_path)
    assert again.lines == first.lines
    assert not [what for _, what in heard if what.startswith("the line from")]
    assert not [what for _, what in heard if what.startswith("computing")]
    fresh, heard = look(owner, blocks, verifier_path, fresh=True)
    assert all(kept.reason == "asked for" for kept in fresh.lines.values())
    assert fresh.speeds["desk"].figures.reason == "asked for"
    assert ("desk", "the line to phone") in heard


def test_lines_that_are_too_old_are_measured_again(
    owner: Trust, blocks: Blocks, verifier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(owner, blocks, verifier_path)
    monkeypatch.setattr(surveying, "LINE_OLDEST", -1.0)
    again, _ = look(owner, blocks, verifier_path)
    assert {kept.reason for ends, kept in again.lines.items()} == {"too old"}


def test_what_was_measured_is_known_later_and_of_damage_nothing(
    owner: Trust, blocks: Blocks, verifier_path: Path, tmp_path: Path
) -> None:
    worker = found(owner)[1]
    assert known_speed(worker) is None
    assert known_line(worker) is None
    done, _ = look(owner, blocks, verifier_path)
    speed, line = known_speed(worker), known_line(worker)
    assert speed is not None
    assert speed.figures == done.speeds["desk"].figures
    assert speed.model == "verifier"
    assert speed.utilisation.peak > 0
    assert line == done.lines[HERE, "desk"]
    assert known_speed(None) is not None
    for path in (tmp_path / "home").rglob("figures/*.json"):
        path.write_text("[{}]")
    assert known_speed(worker) is None
    assert known_line(worker) is None


def test_who_cannot_be_measured_is_left_out_and_it_is_said_why(
    owner: Trust, blocks: Blocks, verifier_path: Path
) -> None:
    attic, desk, phone = found(owner)
    weak = Worker(phone.name, phone.peer, phone.address, phone.facts, frozenset({Right.FILES}))
    gone = Worker("gone", None, trouble=VerifierUnreachable("Nobody is there.", "Switch it on."))
    called_here = Worker(HERE, attic.peer, attic.address, attic.facts, attic.rights)
    shape = model_of(verifier_path).shape
    done = survey(owner, [desk, weak, gone, called_here], blocks, "verifier", shape)
    assert list(done.speeds) == [HERE, "desk"]
    said = {name: str(error) for name, error in done.left_out}
    assert "peers grant NAME compute" in said["phone"]
    assert said["gone"].startswith("Nobody")
    assert "Rename the other" in said[HERE]
    alone = survey(owner, [], blocks, "verifier", shape)
    assert list(alone.speeds) == [HERE]
    assert list(survey(owner, [desk], blocks, "verifier", shape, with_here=False).speeds) == ["desk"]
    assert time.time() - alone.speeds[HERE].figures.taken < 60

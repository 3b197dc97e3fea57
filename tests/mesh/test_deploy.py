"""Deploying: each device gets what it lacks, once, whatever happens to the lines."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.errors import DeviceLost, LayersCorrupt, NotPermitted, PairingRequired, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.mesh import deploy as deploying
from edgellm.mesh.deploy import DeployPart, DeployProgress, deploy
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.layers import PORTION, Worker, ask_worker, find_workers, worker_at
from edgellm.rpc.link import Endpoint
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.storage.layer_pieces import Manifest
from edgellm.storage.layer_store import LayerStore
from testkit.network.relay import Network, Relay
from tests.rpc.layering import device_taking
from tests.rpc.strangers import befriend, device
from tests.storage.pieces import layerwise

PLENTY = 10**9
Send = Callable[..., list[DeployProgress]]


@dataclass
class Home:
    """The device that has the model, and two workers that it is paired with."""

    owner: Trust
    stores: dict[str, LayerStore]
    addresses: dict[str, Address]
    here: LayerStore

    def workers(self) -> dict[str, Worker]:
        return {worker.name: worker for worker in find_workers(self.owner, self.owner.peers.all(), [])}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    owner = device(tmp_path / "owner")
    stores, addresses = {}, {}
    with ExitStack() as running:
        for name in ("desk", "phone"):
            trust = device(tmp_path / name)
            befriend(trust, owner, "files compute", name)
            stores[name] = LayerStore(tmp_path / name / "layers", PLENTY)
            addresses[name] = running.enter_context(device_taking(stores[name], trust))
            owner.peers.record_seen(trust.identity.id, addresses[name])
        yield Home(owner, stores, addresses, LayerStore(tmp_path / "here", PLENTY))


@pytest.fixture(scope="module")
def manifest(verifier_path: Path) -> Manifest:
    return layerwise(verifier_path)


def size(manifest: Manifest, first: int, last: int) -> int:
    return sum(piece.size for piece in manifest.covering(LayerRange(first, last + 1)))


@pytest.fixture
def send(home: Home, verifier_path: Path, manifest: Manifest) -> Send:
    """Deploy parts, each a worker or a device's name, and its first and last layer."""

    def deployed(*parts: tuple[Worker | str | None, int, int]) -> list[DeployProgress]:
        found = home.workers()
        named = [
            DeployPart(found[worker] if isinstance(worker, str) else worker, LayerRange(first, last + 1))
            for worker, first, last in parts
        ]
        return deploy(ModelFile.open(verifier_path), manifest, named, store=home.here)

    return deployed


def test_layers_here_do_not_push_each_other_out(home: Home, send: Send, manifest: Manifest) -> None:
    home.here.limit = size(manifest, 0, 2) - 1
    (done,) = send((None, 0, 2))
    assert isinstance(done.error, StoreFull)
    assert home.here.complete(manifest.pieces[:2])


def at(worker: Worker, port: int) -> Worker:
    """The worker as it is found at another port of this machine."""
    return replace(worker, endpoint=replace(worker.reached(), address=Address("127.0.0.1", port)))


def cutting(relay: Relay, places: list[int]) -> threading.Thread:
    """Cuts the line whenever so many bytes have gone up."""

    def cut() -> None:
        for place in places:
            while relay.carried[0] < place:
                if done.wait(0.002):
                    return
            relay.cut()

    done = threading.Event()
    thread = threading.Thread(target=cut)
    thread.stop = done.set  # type: ignore[attr-defined]
    thread.start()
    return thread


def test_lines_that_are_cut_again_and_again_lose_no_more_than_two_portions(
    home: Home, send: Send, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploying, "PAUSE_SECONDS", 0.01)
    total, rng = sum(piece.size for piece in manifest.pieces), random.Random(5)
    places = sorted(rng.randrange(total) for _ in range(6))
    with Relay(home.addresses["desk"].port, Network(80.0, 0.002)) as relay:
        thread = cutting(relay, places)
        (done,) = send((at(home.workers()["desk"], relay.port), 0, 11))
        thread.stop()  # type: ignore[attr-defined]
        thread.join()
    assert done.error is None
    assert done.attempts > 1
    assert total <= done.sent <= total + 2 * (done.attempts - 1) * PORTION
    assert len(home.stores["desk"].complete(manifest.pieces)) == 12
    assert not list(home.stores["desk"].root.rglob("*.partial"))


def test_who_is_gone_is_given_time_and_then_said_to_be(home: Home, send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploying, "PAUSE_SECONDS", 0.01)
    nowhere = at(home.workers()["desk"], 1)
    gone, done = send((nowhere, 0, 5), ("phone", 6, 11))
    assert isinstance(gone.error, DeviceLost)
    assert "0 of" in str(gone.error)
    assert gone.attempts == deploying.ATTEMPTS
    assert done.error is None


def test_nothing_leaves_for_a_device_without_the_right_to_files(home: Home, send: Send) -> None:
    phone = home.workers()["phone"].peer
    assert phone is not None
    home.owner.peers.revoke(phone.id, [Right.FILES])
    with pytest.raises(NotPermitted, match="edgellm peers grant"):
        send(("desk", 0, 5), ("phone", 6, 11))
    assert not home.stores["desk"].size


def test_a_wrong_manifest_is_forgotten(send: Send, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(deploying, "forget_hashes", forgotten.append)
    monkeypatch.setattr(deploying, "cut_piece", lambda *_: iter([b"other bytes"]))
    (failed,) = send(("desk", 1, 1))
    assert isinstance(failed.error, LayersCorrupt)
    assert forgotten == [manifest.fingerprint]


def test_a_worker_of_this_machine_needs_no_pairing(tmp_path: Path, verifier_path: Path, manifest: Manifest) -> None:
    store = LayerStore(tmp_path, PLENTY)
    with device_taking(store) as address:
        worker = run_in_network_loop(ask_worker(Endpoint("here", address))).result(60)
        (done,) = deploy(ModelFile.open(verifier_path), manifest, [DeployPart(worker, LayerRange(4, 6))])
        assert (done.error, done.sent) == (None, size(manifest, 4, 5))
        elsewhere = Worker("elsewhere", None, Endpoint("elsewhere", Address("192.0.2.1", 50151)))
        (refused,) = deploy(ModelFile.open(verifier_path), manifest, [DeployPart(elsewhere, LayerRange(4, 6))])
        assert isinstance(refused.error, PairingRequired)


def test_workers_are_found_and_what_is_in_the_way_is_said(home: Home, tmp_path: Path) -> None:
    found = home.workers()
    assert {name: worker.address for name, worker in found.items()} == home.addresses
    assert all(worker.facts is not None and worker.facts.limit == PLENTY for worker in found.values())
    assert found["desk"].rights == {Right.FILES, Right.COMPUTE}
    stranger = device(tmp_path / "verifier")
    befriend(stranger, home.owner, "verify", "attic")
    assert "No address of attic is known" in str(home.workers()["attic"].error)
    with device_taking(LayerStore(tmp_path / "attic", PLENTY), stranger) as address:
        home.owner.peers.record_seen(stranger.identity.id, Address("127.0.0.1", 1))
        home.owner.peers.record_seen(stranger.identity.id, address)
        assert "no right to files" in str(home.workers()["attic"].error)


def test_a_worker_at_an_address_is_the_paired_device_that_answers_there(home: Home, tmp_path: Path) -> None:
    def at(address: Address, name: str = "") -> Worker:
        return worker_at(Endpoint(name or str(address), address, home.owner))

    desk = at(home.addresses["desk"])
    assert (desk.name, desk.error) == ("desk", None)
    assert desk.peer is not None
    assert desk.peer.id == home.owner.peers.find("desk").id
    assert Right.COMPUTE in desk.rights
    assert at(home.addresses["desk"], "kitchen").name == "kitchen"
    gone = at(Address("127.0.0.1", 9))
    assert (gone.name, gone.address, str(gone.error)[:9]) == ("127.0.0.1:9", None, "No answer")
    with device_taking(LayerStore(tmp_path / "plain", PLENTY)) as address:  # on this machine, without pairing
        plain = worker_at(Endpoint(str(address), address))
        assert (plain.name, plain.peer, plain.error) == (str(address), None, None)
    assert "nothing listens" in str(worker_at(Endpoint("desk", address)).error)

"""What `edgellm doctor` finds on this machine and of devices that are not as they should be. On loopback."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm import __version__, diagnostics
from edgellm.diagnostics import Finding, examine, examine_multicast, examine_welcome
from edgellm.engine import library
from edgellm.engine.hardware import ComputeDevice
from edgellm.engine.native import Features
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, announce
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.handshake import PeerInfo
from edgellm.rpc.trust.trust import Peer, Right, Trust
from edgellm.rpc_engine.backend import how_to_compile
from tests.rpc.doors import answering, serving
from tests.rpc.strangers import befriend, device, known

VOCABULARY = "ab" * 32
OTHER = Offer(model="other", size=1, vocabulary=bytes.fromhex("00" * 32))


@pytest.fixture
def me(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trust:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")
    return Trust.load()


@pytest.fixture
def desk(me: Trust, tmp_path: Path) -> Trust:
    """A paired device."""
    made = device(tmp_path / "desk")
    befriend(made, me, name="desk")
    return made


def only(found: Iterator[Finding], topic: str) -> Finding:
    (one,) = [finding for finding in found if finding.topic == topic]
    return one


def hint(device: Trust, *addresses: Address, protocol: int = PROTOCOL) -> Hint:
    return Hint(device.identity.id.short, protocol, "0" * 16, addresses)


def peers_of(me: Trust, *hints: Hint) -> list[Finding]:
    return list(diagnostics.examine_peers(me, hints, VOCABULARY))


def test_a_sound_machine_has_no_problem_and_says_what_next_where_there_is_one(me: Trust) -> None:
    found = list(examine())
    assert not [one for one in found if one.state == "problem"]
    topics = {one.topic for one in found}
    assert topics >= {"llama.cpp", "memory", "disk", "identity", "interfaces", "multicast"}
    assert all(bool(one.next_step) is (one.state != "ok") for one in found)


def test_what_is_damaged_is_told_and_the_rest_looked_at(me: Trust, tmp_path: Path) -> None:
    (tmp_path / "home" / "data" / "trust" / "identity.pem").write_text("nonsense")
    found = list(examine(draft=str(tmp_path / "nothing.gguf")))
    assert only(iter(found), "identity").state == "problem"
    assert "nothing.gguf" in only(iter(found), "vocabulary").what
    assert {one.state for one in found if one.topic == "interfaces"} == {"ok"}


def test_a_device_without_an_identity_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "new"))
    assert only(diagnostics.examine_machine(), "identity").state == "note"


def compiled(instructions: str, *backends: str) -> dict[str, Any]:
    """What a machine with AVX2 and a card of NVIDIA's has of llama.cpp."""
    found = Features((instructions,), ("CPU", *backends))
    return {
        "edgellm.engine.native.features": found, "edgellm.system.processor_flags": frozenset({"avx2"}),
        "shutil.which": "/usr/bin/nvidia-smi",
    }  # fmt: skip


def room(free: int) -> dict[str, Any]:
    return {"shutil.disk_usage": SimpleNamespace(free=free)}


CARD = ComputeDevice("CUDA0", "a card", "gpu", 10 * 2**30, 12 * 2**30)


@pytest.mark.parametrize(
    ("there", "topic", "state", "says"),
    [
        (room(2**20), "disk", "problem", "Free some space"), (room(2**31), "disk", "note", "enough for small models"),
        (room(2**40), "disk", "ok", "is free for"),
        ({"edgellm.system.available_memory": (2**20, "the free memory of its control group")}, "memory", "problem",
         "control group"),
        (compiled("SSE3", "CUDA"), "llama.cpp", "note", "no use of this processor's AVX2"),
        (compiled("SSE3", "CUDA"), "llama.cpp", "note", library.how_to_compile()),
        (compiled("AVX2"), "graphics card", "note", "no backend for it"),
        (compiled("AVX2"), "graphics card", "note", library.how_to_compile("-DGGML_CUDA=on", "--gpu cuda")),
        (compiled("AVX2", "CUDA"), "graphics card", "note", "finds none"),
        ({"edgellm.engine.hardware.compute_devices": [CARD]}, "graphics card", "ok",
         "CUDA0 (a card): 10.7 GB of 12.9 GB is free, and layers go there first."),
        ({"edgellm.rpc_engine.backend.is_compiled_in": True}, "rpc engine", "ok", "is compiled in"),
        ({"edgellm.rpc_engine.backend.is_compiled_in": False}, "rpc engine", "note", how_to_compile()),
    ],
)  # fmt: skip
def test_what_this_machine_has_and_lacks_is_told(
    me: Trust, monkeypatch: pytest.MonkeyPatch, there: dict[str, Any], topic: str, state: str, says: str
) -> None:
    for place, value in there.items():
        monkeypatch.setattr(place, lambda *_, value=value: value)
    told = [one for one in diagnostics.examine_machine() if one.topic == topic]
    assert [says in f"{one.what} {one.next_step}" for one in told if one.state == state] == [True]
    assert topic == "llama.cpp" or {one.state for one in told} == {state}


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.setenv("EDGELLM_HOME", str(file))
    told = [one.what for one in diagnostics.examine_machine() if one.topic == "disk"]
    assert told[0] == f"{file / 'data'} cannot be written."


@pytest.mark.parametrize(("kind", "told"), [("DISCRETE_GPU", True), ("INTEGRATED_GPU", True), ("CPU", False)])
def test_a_card_that_vulkan_alone_shows_is_told_of(
    kind: str, told: bool, me: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vulkaninfo"
    program.write_text(f"#!/bin/sh\necho 'deviceType = PHYSICAL_DEVICE_TYPE_{kind}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edgellm.engine.native.features", lambda: Features(("AVX2",), ("CPU",)))
    notes = [one for one in diagnostics.examine_machine() if one.topic == "graphics card"]
    assert [one.state for one in notes] == ["note"] * told
    assert all(one.next_step.endswith(library.how_to_compile("-DGGML_VULKAN=on", "--gpu vulkan")) for one in notes)


def test_what_decodes_and_what_stays_idle_is_said(me: Trust) -> None:
    found = [*diagnostics.examine_machine()]
    (backends,) = [one.what.partition("backends: ")[2] for one in found if "backends: " in one.what]
    assert "CPU" in backends
    assert "idle" not in diagnostics.processor(4, 4).what
    assert "4 of 8 processors stay idle" in diagnostics.processor(4, 8).what


def test_a_machine_in_no_network_is_told() -> None:
    assert only(diagnostics.examine_interfaces([]), "interfaces").state == "problem"


def test_silence_where_not_even_our_own_word_comes_back_is_a_firewall_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "announce", lambda *_: announce(ServiceKind.TEST, "", 1, []))  # says nothing
    monkeypatch.setattr(diagnostics, "LISTEN_SECONDS", 0.2)
    hints, came_back = diagnostics.listen("0000-0000", ["127.0.0.1"])
    assert not came_back
    assert (
        "UDP port 5353" in only(examine_multicast(hints, came_back, "0000-0000", ["127.0.0.1"]), "multicast").next_step
    )


def test_where_nothing_can_be_announced_is_told() -> None:
    told = next(one for one in examine_multicast((), True, "0000-0000", ["192.0.2.99"]) if one.state == "problem")
    assert "Announcements on 192.0.2.99 fail" in told.what


def test_another_device_with_our_identity_is_told(me: Trust) -> None:
    copy = hint(me, Address("192.0.2.7", 5))
    found = only(examine_multicast((copy,), True, me.identity.id.short, []), "identity")
    assert found.state == "problem"
    assert found.what.startswith("192.0.2.7")
    assert "identity.pem" in found.next_step


async def test_a_device_that_is_there_is_fine(me: Trust, desk: Trust) -> None:
    async with serving(desk) as address:
        me.peers.record_seen(desk.identity.id, address)  # Threads look, as the network's loop does, too.
        quiet = await asyncio.to_thread(peers_of, me)
        heard = await asyncio.to_thread(peers_of, me, hint(desk, address))
        old = await asyncio.to_thread(peers_of, me, hint(desk, address, protocol=PROTOCOL - 1))
        desk.peers.remove(me.identity.id)
        (stranger,) = await asyncio.to_thread(peers_of, me)
    assert [one.topic for one in heard if one.state == "ok"] == ["peers", "vocabulary"]
    assert [one.topic for one in quiet if one.state == "note"] == ["multicast"]
    assert "--peer" in quiet[0].next_step
    (too_old,) = [one for one in old if one.state == "problem"]
    assert (too_old.topic, too_old.next_step) == ("versions", "Update edgellm on desk.")
    assert stranger.state == "problem"
    assert "do not trust each other" in stranger.what


async def test_a_device_of_another_version_says_who_is_to_update(me: Trust, desk: Trust) -> None:
    async with answering(desk, lambda reply: setattr(reply, "protocol", PROTOCOL + 1)) as address:
        me.peers.record_seen(desk.identity.id, address)
        (one,) = await asyncio.to_thread(peers_of, me)
        assert (one.topic, one.state) == ("versions", "problem")
        assert "this device" in one.next_step


def test_a_device_without_an_address_and_one_that_is_on_and_serves_nothing(me: Trust, desk: Trust) -> None:
    (one,) = peers_of(me)
    assert one.state == "problem"
    assert "No address of desk is known" in one.what
    me.peers.record_seen(desk.identity.id, Address("127.0.0.1", 1))
    (one,) = peers_of(me)
    assert "desk is on, but nothing listens at 127.0.0.1:1" in one.what
    assert "edgellm serve" in one.next_step
    (one,) = peers_of(me, hint(desk, Address("127.0.0.1", 1)))
    assert (one.topic, one.state) == ("firewall", "problem")
    assert "refuses" in one.what


@pytest.fixture
def sound(desk: Trust) -> PeerInfo:
    peer: Peer = known(desk, "desk")
    offer = Offer(model="big", size=1, vocabulary=bytes.fromhex(VOCABULARY))
    version = __version__
    return PeerInfo(peer, Address("127.0.0.1", 5), version, frozenset({Right.VERIFY}), (offer,), 0.001)


@pytest.mark.parametrize(
    ("changes", "topic", "says"),
    [
        ({"version": "0.0.1"}, "versions", "desk runs edgellm 0.0.1"),
        ({"rights": frozenset()}, "rights", "does not verify this device"),
        ({"offers": (OTHER,)}, "vocabulary", "does not have the draft model's vocabulary"),
    ],
)
def test_what_a_device_says_is_judged(sound: PeerInfo, changes: dict[str, Any], topic: str, says: str) -> None:
    found = examine_welcome(replace(sound, **changes), VOCABULARY)
    bad = [one for one in found if one.state != "ok"]
    assert [one.topic for one in bad] == [topic]
    assert says in bad[0].what
    assert bad[0].next_step


def test_one_of_several_models_with_the_draft_models_vocabulary_is_enough(sound: PeerInfo) -> None:
    others = (Offer(model="other", size=0, vocabulary=bytes.fromhex("00" * 32), behind="vLLM by score"), *sound.offers)
    found = list(examine_welcome(replace(sound, offers=others), VOCABULARY))
    assert all(one.state == "ok" for one in found)
    assert any("is a gateway to other, by vLLM by score" in one.what for one in found)

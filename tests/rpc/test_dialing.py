"""What a device dials because another one asks it to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from edgellm.errors import EdgeError, MeasureFailed
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.discovery import peer_probe
from edgellm.rpc.discovery.peer_probe import dialable_addresses, uniform_failure
from edgellm.rpc.measuring import request_link_measurement
from edgellm.rpc.trust.trust import Peer
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import in_loop
from tests.rpc.layering import taking
from tests.rpc.strangers import befriend, device, known


def met_at(tmp_path: Path, *places: str) -> Peer:
    return replace(known(device(tmp_path), "desk"), addresses=tuple(map(Address.parse, places)))


def test_a_device_is_dialled_where_it_is_known_to_be_and_nowhere_else(tmp_path: Path) -> None:
    peer = met_at(tmp_path, "192.168.1.5:50151", "127.0.0.1:7", "desk.local:50151")
    met = ["192.168.1.5:50151"]
    elsewhere = (
        "192.168.1.5:50151", "192.168.1.6:50151", "127.0.0.1:22", "[::1]:22", "[::ffff:127.0.0.1]:22",
        "169.254.169.254:80", "desk.local:50151", "evil.example:443", "localhost:22", "no address", "",
    )  # fmt: skip
    for asked, found in (("192.168.1.5:50999", ["192.168.1.5:50999", *met]), *((one, met) for one in elsewhere)):
        assert [str(place) for place in dialable_addresses(peer, asked, local=False)] == found, asked
    found = [str(place) for place in dialable_addresses(peer, "127.0.0.1:22", local=True)]
    assert found == ["127.0.0.1:22", *met, "127.0.0.1:7"]


@contextmanager
def listening() -> Iterator[Address]:
    """A program that has nothing to do with edgellm, and that nobody must call."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setblocking(False)
        yield Address(*door.getsockname()[:2])
        with pytest.raises(BlockingIOError):
            door.accept()


@in_loop
async def test_what_listens_on_the_machine_is_not_touched_for_a_device_elsewhere(
    store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every failure is the same."""
    monkeypatch.setattr("edgellm.services.server.layer_service.is_local_caller", lambda _context: False)
    monkeypatch.setattr("edgellm.services.server.layer_service.announced_addresses", lambda _peer, _seconds: [])
    monkeypatch.setattr(peer_probe, "FAILED_SECONDS", 0.0)
    owner, desk, phone = (device(tmp_path / name) for name in ("owner", "desk", "phone"))
    befriend(desk, owner, "compute")
    befriend(phone, desk, "compute")
    said = set()
    with listening() as there:
        async with taking(store, desk) as at_desk, open_channel(at_desk, owner, desk.identity.id) as channel:
            for asked in (there, Address("127.0.0.1", 1), Address("localhost.", 80), None):
                with pytest.raises(MeasureFailed) as refused:
                    await request_link_measurement(channel, "desk", phone.identity.id, asked)
                said.add(str(refused.value))
    assert len(said) == 1


@in_loop
async def test_failures_take_the_same_time_for_who_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    # not `asyncio.sleep` itself: tasks of other tests may still be ending in this process's loop
    monkeypatch.setattr(peer_probe, "asyncio", SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop))
    for near in (False, True):
        with pytest.raises(EdgeError, match="One answer"):
            async with uniform_failure(
                near, [ValueError, grpc.aio.AioRpcError], EdgeError("One answer.", "Ask again.")
            ):
                raise ValueError("refused, or timed out, or no TLS")
    assert len(slept) == 1
    assert 0.0 < slept[0] <= peer_probe.FAILED_SECONDS


@in_loop
async def test_a_device_that_has_moved_is_looked_for_where_it_announces_itself(
    store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.rpc.measuring.SECONDS", 0.02)
    monkeypatch.setattr("edgellm.services.server.layer_service.is_local_caller", lambda _context: False)
    owner, desk, phone = (device(tmp_path / name) for name in ("owner", "desk", "phone"))
    for worker in (desk, phone):
        befriend(worker, owner, "compute")
    befriend(phone, desk, "compute")
    announced: list[Any] = []
    async with taking(store, desk) as at_desk, taking(store, phone) as at_phone:
        announced.append(at_phone)
        where = "edgellm.services.server.layer_service.announced_addresses"
        monkeypatch.setattr(where, lambda _peer, _seconds: announced)
        async with open_channel(at_desk, owner, desk.identity.id) as channel:
            assert (await request_link_measurement(channel, "desk", phone.identity.id, at_phone)).up > 0

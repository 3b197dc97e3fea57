"""llama.cpp's RPC through a worker: who reaches a server, how long it lives, and what comes through."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from edgellm.engine.hardware import Hardware
from edgellm.engine.native import VERSION
from edgellm.errors import DeviceLost, ProtocolError
from edgellm.mesh.layer_sources import SeveralSources
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.rpc_engine.service import RpcEngineService
from edgellm.rpc_engine.session import TUNNEL, RpcPort, ask_offer
from edgellm.services.server.servers import WorkerServer
from tests.rpc.strangers import befriend, device
from tests.rpc_engine.processes import rpc_servers
from tests.services.conftest import ANYWHERE
from tests.waiting import until

pytestmark = pytest.mark.rpc

MEMORY = 256 * 2**20


@pytest.fixture
def guest(tmp_path: Path, host: Trust) -> Trust:
    made = device(tmp_path / "guest")
    befriend(host, made, "compute")
    return made


@pytest.fixture
def worker(host: Trust, guest: Trust, home: Path) -> Iterator[WorkerServer]:
    cache = WeightCache(SeveralSources(), unit=ComputeUnit(Hardware(threads=1)), memory=2 * MEMORY)
    with WorkerServer(cache, ANYWHERE, trust=host, more=(RpcEngineService,)) as running:
        yield running


@pytest.fixture
def endpoint(worker: WorkerServer, guest: Trust, host: Trust) -> Endpoint:
    return Endpoint("worker", worker.address, guest, host.identity.id)


@pytest.fixture
def session(endpoint: Endpoint) -> Iterator[RpcPort]:
    made = RpcPort(endpoint, memory=MEMORY, weights=MEMORY, model="it")
    yield made
    made.close()


def test_a_worker_serves_no_rpc_unless_it_is_told_to(host: Trust, guest: Trust) -> None:
    cache = WeightCache(SeveralSources(), unit=ComputeUnit(Hardware(threads=1)), memory=MEMORY)
    with WorkerServer(cache, ANYWHERE, trust=host) as running, pytest.raises(DeviceLost, match="is not a worker"):
        ask_offer(Endpoint("worker", running.address, guest, host.identity.id))


def test_another_process_of_this_machine_gets_no_byte_through(session: RpcPort) -> None:
    port = session.open(os.getppid())
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(60)
        with suppress(OSError):
            stranger.sendall(b"\x0e" + bytes(8))
            assert stranger.recv(1) == b""


def test_without_the_right_to_compute_nobody_is_served(endpoint: Endpoint, host: Trust, guest: Trust) -> None:
    host.peers.revoke(guest.identity.id, [Right.COMPUTE])
    host.peers.grant(guest.identity.id, [Right.VERIFY, Right.FILES])
    with pytest.raises(DeviceLost, match="no right to compute"):
        ask_offer(endpoint)
    refused = RpcPort(endpoint, memory=MEMORY, weights=0, model="it")
    with pytest.raises(DeviceLost, match="no right to compute"):
        refused.open(os.getpid())
    assert not rpc_servers()


def test_another_paired_device_does_not_reach_the_server_of_a_session(
    worker: WorkerServer, session: RpcPort, host: Trust, tmp_path: Path
) -> None:
    other = device(tmp_path / "other")
    befriend(host, other, "compute")
    session.open(os.getpid())

    async def knock() -> grpc.StatusCode:
        async with open_channel(worker.address, other) as channel:
            call = channel.stream_stream(TUNNEL, bytes, bytes)()  # type: ignore[call-arg]
            await call.write(pb.RpcFrame(session=session.begin.session).SerializeToString())
            with suppress(grpc.aio.AioRpcError):
                await call.read()
            return await call.code()

    assert run_in_network_loop(knock()).result() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_server_ends_with_the_session(session: RpcPort) -> None:
    session.open(os.getpid())
    assert len(rpc_servers()) == 1
    session.close()
    until(lambda: not rpc_servers())
    assert not session.lost.done()


def test_a_server_that_dies_ends_the_session_but_not_the_worker(session: RpcPort, endpoint: Endpoint) -> None:
    session.open(os.getpid())
    rpc_servers()[0].kill()
    assert "has ended" in session.lost.result(60).what
    assert ask_offer(endpoint).version


def test_too_much_memory_and_other_versions_are_refused(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = RpcPort(endpoint, memory=4 * MEMORY, weights=0, model="it")
    with pytest.raises(DeviceLost, match="it takes 1074 MB here"):
        greedy.open(os.getpid())
    sessions = [RpcPort(endpoint, memory=3 * MEMORY // 2, weights=0, model="it") for _ in range(2)]
    sessions[0].open(os.getpid())
    with pytest.raises(DeviceLost, match="are left"):
        sessions[1].open(os.getpid())
    sessions[0].close()
    until(lambda: not rpc_servers())
    sessions[1] = RpcPort(endpoint, memory=3 * MEMORY // 2, weights=0, model="it")
    sessions[1].open(os.getpid())
    sessions[1].close()
    monkeypatch.setattr("edgellm.rpc_engine.service.VERSION", "0.0.1")
    with pytest.raises(ProtocolError, match=rf"llama-cpp-python 0\.0\.1, and this device {VERSION}"):
        sessions[1].open(os.getpid())


@pytest.mark.parametrize("hang", [False, True])
def test_a_device_that_is_gone_or_hangs_is_lost(
    worker: WorkerServer, session: RpcPort, monkeypatch: pytest.MonkeyPatch, hang: bool
) -> None:
    session.open(os.getpid())
    if hang:
        from edgellm.rpc_engine import service

        monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 3600.0)
        assert "has stopped responding" in session.lost.result(60).what
    else:
        worker.stop(0)
        assert session.lost.result(60).what
    until(lambda: not rpc_servers())

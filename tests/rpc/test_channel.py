"""Who may listen where."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgellm.errors import InvalidOption, PairingRequired, PortTaken
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server, open_channel


def listen(address: Address) -> Address:
    """Binds a server there, and closes it."""

    async def go() -> Address:
        server = new_server()
        try:
            return bind(server, address)
        finally:
            await server.stop(None)

    return asyncio.run(go())


@pytest.fixture(params=["127.0.0.1", "::1"])
def taken(request: pytest.FixtureRequest) -> Iterator[Address]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip(f"this machine has no {request.param}")
        listener.listen()
        yield Address(request.param, listener.getsockname()[1])


def test_a_taken_port_is_said_with_the_next_step(taken: Address) -> None:
    with pytest.raises(PortTaken, match=f"--port {taken.port + 1}"):
        listen(taken)


def test_two_verifiers_cannot_share_a_port() -> None:
    async def go() -> None:
        first, second = new_server(), new_server()
        try:
            address = bind(first, Address.of("127.0.0.1", 0))
            await first.start()
            with pytest.raises(PortTaken):
                bind(second, address)
        finally:
            await first.stop(None)
            await second.stop(None)

    asyncio.run(go())


def test_an_address_of_another_machine_is_an_invalid_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "require_loopback", lambda self: self)
    with pytest.raises(InvalidOption, match="This device cannot listen"):
        listen(Address.of("192.0.2.1", 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.20"])
def test_neither_side_leaves_this_machine(host: str) -> None:
    with pytest.raises(PairingRequired):
        listen(Address.of(host, 50151))
    with pytest.raises(PairingRequired):
        open_channel(Address.of(host, 50151))


@pytest.mark.parametrize(
    "room",
    ["rpc.channel", "services.client.verifier_client", "services.server.servers"],
)
def test_grpc_writes_nothing_to_the_terminal(room: str) -> None:
    """Its core would, for example when a port is taken."""
    code = f"""
import edgellm.{room}, asyncio, socket
from edgellm.rpc import channel
channel.probe = lambda address: None
with socket.create_server(("127.0.0.1", 0)) as taken:
    async def go():
        try:
            channel.bind(channel.new_server(), channel.Address("127.0.0.1", taken.getsockname()[1]))
        except channel.PortTaken:
            print("taken")
    asyncio.run(go())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("taken\n", "")

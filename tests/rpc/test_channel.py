"""Who may listen where."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgellm.errors import InvalidOption, PairingRequired, PortTaken, ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import listening
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.versions import parse_message


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


def test_of_several_addresses_those_that_answer_are_found(taken: Address) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = Address("127.0.0.1", gone.getsockname()[1])
    assert run_in_network_loop(listening([closed, taken])).result() == [taken]


def test_a_message_beyond_its_size_is_not_parsed_and_what_is_none_is_one_error() -> None:
    data = pb.PairDone(mac=b"x" * 100).SerializeToString()
    with pytest.raises(ProtocolError, match="102 bytes; 50 are allowed"):
        parse_message(pb.PairDone, data, 50)
    with pytest.raises(ProtocolError, match="PairDone cannot be parsed"):
        parse_message(pb.PairDone, b"\x0a\x05x")


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


def test_grpc_writes_nothing_to_the_terminal() -> None:
    """Its core would, for example when a port is taken."""
    code = """
import asyncio, socket
from edgellm.rpc import channel
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

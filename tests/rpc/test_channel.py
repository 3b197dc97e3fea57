"""Who may listen where."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.errors import InvalidOption, PairingRequired, PortTaken, ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import listening
from edgellm.rpc.protos import PROTOCOL, parse_message
from edgellm.rpc.protos import trust_pb2 as pb
from tests.programs import run_python
from tools import protos


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
    done = run_python(code)
    assert (done.stdout, done.stderr, done.returncode) == ("taken\n", "", 0)


def test_committed_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    for made in protos.generate(tmp_path):
        committed = protos.ROOT / made.relative_to(tmp_path)
        assert made.read_text() == committed.read_text(), "run: python -m tools.protos"
    assert f"// Protocol version {PROTOCOL}, " in (protos.ROOT / protos.PROTOS[0]).read_text()


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50151", "127.0.0.1", 50151), (" 127.0.0.1:1 ", "127.0.0.1", 1), ("[::1]:65535", "::1", 65535),
        ("localhost:50151", "127.0.0.1", 50151), ("LOCALHOST:50151", "127.0.0.1", 50151),
        ("desk.local:80", "desk.local", 80), ("192.168.1.20:0", "192.168.1.20", 0),
    ],
)  # fmt: skip
def test_reads_an_address(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "127.0.0.1", "127.0.0.1:", ":50151", "::1:50151", "[::1]", "[::1]50151", "[fe80::1%eth0]:1", "a b:1",
        "host:1:2", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:５", "127.0.0.1:123456", "256.0.0.1:1", "127.1:1",
        "-a:1", "a/b:1", "unix:/tmp/x", "dns:127.0.0.1:5", "[127.0.0.1:5",
    ],
)  # fmt: skip
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOption):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    assert Address.of(host, 1).require_loopback().loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "10.0.0.1", "8.8.8.8", "fe80::1", "desk.local"])
def test_everything_else_needs_pairing_first(host: str) -> None:
    for use in (Address.require_loopback, listen, open_channel):
        with pytest.raises(PairingRequired, match="Pair the devices first"):
            use(Address.of(host, 50151))

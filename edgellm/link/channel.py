"""gRPC as we use it: limits, keepalive, and no surprises from the environment."""

from __future__ import annotations

import errno
import socket
from typing import TypeAlias

import grpc
import grpc.aio

from edgellm.errors import InvalidOption, PortTaken
from edgellm.link import edgellm_pb2 as pb
from edgellm.link.address import Address

PROTOCOL = 2
DEFAULT_PORT = 50151
MAX_MESSAGE = 16 * 2**20  # bytes, either way
MAX_CHUNK = 256  # tokens
MAX_EXTRA = 4096  # tokens
HELLO_SECONDS = 2.0  # how long the verifier may take for its first words
HEARTBEAT_SECONDS = 0.25  # between two Working frames
TAKE_SECONDS = 10.0  # how long a device may leave a frame untaken
LONGEST_BUSY_MS = 60_000  # a device asks again after that, whatever it is told
BLOCK = 256  # tokens of a vocabulary that share one hash
BLOCK_HASH = 8  # bytes of it that travel

_SERVICE = pb.DESCRIPTOR.services_by_name["Verification"]
SERVICE = _SERVICE.full_name
HELLO = f"/{SERVICE}/{_SERVICE.methods_by_name['Hello'].name}"
COMPARE_VOCABULARY = f"/{SERVICE}/{_SERVICE.methods_by_name['CompareVocabulary'].name}"
SESSION = f"/{SERVICE}/{_SERVICE.methods_by_name['Session'].name}"

Options: TypeAlias = list[tuple[str, int]]

_LIMITS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_CHANNEL: Options = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # an idle connection is kept, so that its end means something
    ("grpc.use_local_subchannel_pool", 1),  # a new channel means a new connection, not a broken one found again
    ("grpc.enable_http_proxy", 0),  # a home device is never behind the proxy that the environment names
    ("grpc.enable_retries", 0),  # whether to ask again is the session's decision
]
_SERVER: Options = [
    *_LIMITS,
    ("grpc.so_reuseport", 0),  # else two verifiers share a port silently
    ("grpc.keepalive_time_ms", 30_000),  # finds devices that left without a word
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", 256),
]


def open_channel(address: Address) -> grpc.aio.Channel:
    """A connection to a verifier, made when first used. Plain text, so loopback only.

    Raises:
        PairingRequired: the address leaves this machine.
    """
    return grpc.aio.insecure_channel(str(address.require_loopback()), options=_CHANNEL)


def new_server() -> grpc.aio.Server:
    """A server that listens nowhere yet. To be made in the event loop that runs it."""
    return grpc.aio.server(options=_SERVER)


def bind(server: grpc.aio.Server, address: Address) -> Address:
    """Makes `server` listen at `address`; returns the address with the real port.

    Raises:
        PairingRequired: the address is not loopback.
        PortTaken: something else listens there.
        InvalidOption: this machine does not have the address, or does not give the port to this user.
    """
    probe(address.require_loopback())
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError:
        port = 0
    if not port:
        raise _taken(address)
    return Address(address.host, port)


def probe(address: Address) -> None:
    """Finds out whether, and if not why, one can listen at an address; gRPC says no more than no, and on stderr.

    Raises:
        PortTaken: something else listens there.
        InvalidOption: this machine does not have the address, or does not give the port to this user.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a port in TIME_WAIT is free
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)  # where two may bind, only one may listen
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(address) from None
            raise InvalidOption(
                f"Nobody can listen at {address}: {error.strerror}.", "Choose another host, or a port above 1023."
            ) from None


def _taken(address: Address) -> PortTaken:
    return PortTaken(
        f"Port {address.port} on {address.host} is taken by another program, perhaps by a verifier that already runs.",
        f"Stop it, or choose another port: --port {min(address.port + 1, 65535)}.",
    )

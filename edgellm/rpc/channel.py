"""gRPC channels and servers, and the process's one event loop for them.

The loop runs as long as the process: gRPC's asyncio API has one poller for all loops, and calls into loops that have
ended.
"""

import asyncio
import errno
import json
import socket
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from edgellm.errors import InvalidOption, PortTaken
from edgellm.rpc import PAIRING_PORT
from edgellm.rpc.address import Address
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.identity import SERVER_NAME, DeviceID
from edgellm.rpc.trust.trust import Trust

T = TypeVar("T")


@cache
def _network_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="edgellm-link", daemon=True).start()
    return loop


_start_lock = threading.Lock()


def network_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs in a thread of its own. Code that runs in it must never block."""
    with _start_lock:
        return _network_loop()


def run_in_network_loop(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the network loop, from another thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, network_loop())


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all `works` until the first ends, and cancel the others. Raise the first one's error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MAX_MESSAGE = 16 * 2**20  # bytes, either way
MAX_VERDICT = 2**20  # bytes of a verifier's message in a session: a verdict with all log-probabilities has 0.8 MB
MAX_CHUNK = 256  # tokens
MAX_EXTRA = 4096  # tokens
HELLO_SECONDS = 6.0  # limit for a device's first answer, where something listens: it may be busy
HEARTBEAT_SECONDS = 0.25  # pause between two Working frames
READ_TIMEOUT_SECONDS = 10.0  # limit for a device to read a frame
MAX_BUSY_MS = 60_000  # a device asks again after this time at the latest

CONTRACT = pb.DESCRIPTOR.services_by_name["Verification"]
SERVICE = CONTRACT.full_name
HELLO = f"/{SERVICE}/Hello"
TOKENIZER, SESSION = f"/{SERVICE}/Tokenizer", f"/{SERVICE}/Session"

_SESSION_LIMIT = {"name": [{"service": SERVICE, "method": "Session"}], "maxResponseMessageBytes": MAX_VERDICT}

Options: TypeAlias = list[tuple[str, int | str]]

_LIMITS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_CHANNEL: Options = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # idle connections stay, so that a loss means something
    ("grpc.use_local_subchannel_pool", 1),  # a new channel opens a new connection, not a broken shared one
    ("grpc.enable_http_proxy", 0),  # a home device is never behind the environment's proxy
    ("grpc.enable_retries", 0),  # retrying is the session's decision
    ("grpc.service_config", json.dumps({"methodConfig": [_SESSION_LIMIT]})),
]
_SERVER: Options = [
    *_LIMITS,
    ("grpc.so_reuseport", 0),  # otherwise two verifiers share a port silently
    ("grpc.keepalive_time_ms", 30_000),  # keepalives detect devices that left without closing
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.server_handshake_timeout_ms", 10_000),
]

_PAIRING: Options = [
    ("grpc.max_send_message_length", 2**16),
    ("grpc.max_receive_message_length", 2**16),
    ("grpc.max_concurrent_streams", 4),
]


def open_channel(address: Address, trust: Trust | None = None, device: DeviceID | None = None) -> grpc.aio.Channel:
    """Open a channel to a device, which connects on first use: in plain text on this machine, or by mutual TLS. With
    `trust`, the channel uses mutual TLS to the paired `device`, or to any paired device when `device` is None;
    `rpc.trust.handshake` then finds out which one answers."""
    if trust is None:
        return grpc.aio.insecure_channel(str(address.require_loopback()), options=_CHANNEL)
    trust.require_peers(address)
    options = [*_CHANNEL, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(str(address), trust.channel_credentials(device), options=options)


def open_pairing_channel(address: Address) -> grpc.aio.Channel:
    """Open a plain-text channel to a device that claims to show a code; pairing verifies the claim."""
    return grpc.aio.insecure_channel(str(address), options=[*_PAIRING, *_CHANNEL])


def new_server(*, pairing: bool = False) -> grpc.aio.Server:
    """Create a server that does not listen yet; for `pairing` only with small messages, and few streams at a time. Call
    this in the event loop that runs the server."""
    return grpc.aio.server(options=[*_PAIRING, *_SERVER] if pairing else _SERVER)


def bind(server: grpc.aio.Server, address: Address, trust: Trust | None = None) -> Address:
    """Make `server` listen at `address`, by mutual TLS if `trust` is given; return the address with the real port."""
    if trust is None:
        return _bind(server, address.require_loopback(), None)
    trust.require_peers()
    return _bind(server, address, trust.server_credentials())


def bind_pairing(server: grpc.aio.Server, hosts: Sequence[str], port: int | None) -> list[Address]:
    """Make a pairing server listen at all of `hosts`, in plain text and at one port; None: the usual one, or another
    where that is taken. Use it for no other server. Raise PortTaken and InvalidOption as `bind` does."""
    try:
        first = _bind(server, Address.of(hosts[0], PAIRING_PORT if port is None else port), None)
    except PortTaken:
        if port is not None:
            raise
        first = _bind(server, Address.of(hosts[0], 0), None)
    return [first, *(_bind(server, Address.of(host, first.port), None) for host in hosts[1:])]


def _bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    check_bindable(address)
    port = 0
    with suppress(RuntimeError):
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    if not port:
        raise _taken(address)
    return Address(address.host, port)


def check_bindable(address: Address) -> None:
    """Check that this process can listen at an address, as `bind` does; gRPC gives the reason only on stderr."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like gRPC: a port in TIME_WAIT is free
        try:
            tried.bind((address.host, address.port))
            tried.listen(1)  # two sockets may bind, but only one may listen
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(address) from None
            raise InvalidOption(
                f"This device cannot listen at {address}: {error.strerror}.", "Use another host, or a port above 1023."
            ) from None


def _taken(address: Address) -> PortTaken:
    return PortTaken(
        f"Port {address.port} on {address.host} is in use, perhaps by a verifier that is already running.",
        f"Stop it, or choose another port: --port {min(address.port + 1, 65535)}.",
    )

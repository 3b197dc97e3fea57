"""A session of the RPC engine at a worker, as the client sees it: a port of this machine that leads to its server; and
the parts of `rpc_engine.proto` that the worker shares."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from edgellm.errors import SAME_VERSION, EdgeError, ProtocolError
from edgellm.rpc.channel import first_of, run_in_network_loop
from edgellm.rpc.link import WORKER_TIMING, Endpoint, ServiceLink, lost
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc_engine.backend import HOST, is_at
from edgellm.services.mesh_codec import check_engine

RPC_CONTRACT = pb.DESCRIPTOR.services_by_name["RpcEngine"]
OFFER, SERVE, TUNNEL = (f"/{RPC_CONTRACT.full_name}/{name}" for name in ("Offer", "Serve", "Tunnel"))
MAX_BUFFER = 16 * 2**20
"""Bytes that wait on either side of a socket: a busy device stops for tens of milliseconds at a time, and the others go
on meanwhile."""
_log = logging.getLogger(__name__)

Socket = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Moved:
    """The bytes that streams have `moved` both ways, and the `monotonic` time of the last bytes to the server, None if
    some have come back since. llama.cpp waits for a server without a limit, and a server that hangs keeps its
    connection, while its worker goes on saying that it is alive; so the bytes are watched."""

    moved: int = 0
    asked_at: float | None = None

    def sent(self, count: int) -> None:
        """Count bytes to the server."""
        self.moved += count
        self.asked_at = monotonic()

    def received(self, count: int) -> None:
        """Count bytes from the server."""
        self.moved += count
        self.asked_at = None


async def carry(
    socket: Socket, read: Callable[[], Awaitable[object]], write: Callable[[bytes], Awaitable[None]],
    session: bytes = b"", traffic: Moved | None = None,
) -> None:  # fmt: skip
    """Carry bytes between a socket and a stream of frames, both ways, until either ends. Each side is read only as fast
    as the other takes it. `session` is named in the first frame, which is sent at once. `traffic` counts the bytes."""
    reader, writer = socket
    counted = traffic or Moved()
    writer.transport.set_write_buffer_limits(MAX_BUFFER)

    async def to_stream() -> None:
        if session:
            await write(pb.RpcFrame(session=session).SerializeToString())
        while data := await reader.read(2**20):  # a frame, which fits a message
            await write(pb.RpcFrame(data=data).SerializeToString())
            counted.sent(len(data))

    async def to_socket() -> None:
        while isinstance(message := await read(), bytes):
            data = parse_message(pb.RpcFrame, message).data
            counted.received(len(data))
            writer.write(data)
            await writer.drain()

    try:
        await first_of(to_stream(), to_socket())
    except ConnectionError:  # the socket is closed
        return
    finally:
        writer.transport.abort()


def ask_offer(endpoint: Endpoint) -> pb.OfferReply:
    """Ask a worker what it offers over llama.cpp's RPC. Raises DeviceLost: it does not answer, or does not serve it;
    ProtocolError, PeerTooOld, PeerTooNew: it has another version."""
    answer = run_in_network_loop(endpoint.ask(OFFER, pb.OfferRequest(protocol=PROTOCOL))).result()
    reply = parse_message(pb.OfferReply, answer)
    check_version(reply.protocol, endpoint.name)
    check_engine(reply.version, endpoint.name)
    return reply


class RpcPort:
    """An RPC server at a worker, and the port of this machine through which one process reaches it by mutual TLS.

    Any thread may use it. When the worker or its server is lost, all connections are closed at once; `lost` has the
    reason.
    """

    def __init__(self, endpoint: Endpoint, *, memory: int, weights: int, model: str) -> None:
        """Set up a session for a part of `model` that takes `memory` bytes there, `weights` of them of tensors."""
        self.name, self._endpoint = endpoint.name, endpoint
        self.begin = pb.Begin(protocol=PROTOCOL, session=os.urandom(16), memory=memory, weights=weights, name=model)
        self.lost: Future[EdgeError] = Future()
        self.traffic = Moved()
        self._client = 0
        self._link = ServiceLink(SERVE, replace(WORKER_TIMING, stall=inf))
        self._closed = False
        self._blamed: EdgeError | None = None
        self._live: Future[None] | None = None

    def open(self, process: int) -> int:
        """Have the worker start a server; return the port of this machine that leads there, for a `process` and no
        other. Raises DeviceLost: the device is not reached, or refuses; as `ask_offer`: another llama.cpp would not
        understand this one."""
        self._client = process
        ask_offer(self._endpoint)
        serving: Future[int] = Future()
        self._live = run_in_network_loop(self._run(serving))
        return serving.result()

    def confirm(self) -> None:
        """Tell the worker that the model is loaded, so that it may keep the weights."""
        self._link.post(pb.RpcOrder(whole=pb.Whole()))

    def blame(self, error: EdgeError) -> None:
        """End the session for a reason that is known here alone; it is then `lost`."""
        self._blamed = error
        self._link.close()

    def close(self) -> None:
        """End the session, and the server with it."""
        self._closed = True
        self._link.close()
        if self._live is not None:
            with suppress(Exception):
                self._live.result()

    async def _run(self, serving: Future[int]) -> None:
        error, _ = await self._endpoint.hold(lambda channel: self._hold(channel, serving))
        if not serving.done():
            serving.set_exception(error)
        if not self._closed:
            self.lost.set_result(self._blamed or error)

    async def _hold(self, channel: grpc.aio.Channel, serving: Future[int]) -> None:
        """Hold the session until it ends; `serving` gets the port once the server has started."""

        async def connected(*socket: Any) -> None:
            await self._tunnel(channel, socket)

        listener = await asyncio.start_server(connected, HOST, 0, limit=MAX_BUFFER)
        link = self._link
        link.send(pb.RpcOrder(begin=self.begin).SerializeToString())

        def take(data: bytes) -> None:
            expected = "beat" if serving.done() else "serving"
            if parse_message(pb.RpcReport, data).WhichOneof("report") != expected:
                raise ProtocolError(f"{self.name} sends another report than {expected!r}.", SAME_VERSION)
            if not serving.done():
                link.owe()
                serving.set_result(listener.sockets[0].getsockname()[1])

        def beat(waited: float) -> None:
            if serving.done() and (trouble := link.trouble(waited)):
                raise lost(f"{self.name} at {self._endpoint.address} {trouble}.")

        try:
            await link.run(channel, take, beat)
        finally:
            listener.close()  # the tunnels end with the channel

    async def _tunnel(self, channel: grpc.aio.Channel, socket: Socket) -> None:
        try:
            port = socket[1].get_extra_info("peername")[1]
            if not await asyncio.to_thread(partial(is_at, self._client, port, listens=False)):
                _log.warning("refused a connection to %s from another process", self.name)
                return
            call = channel.stream_stream(TUNNEL, bytes, bytes)()  # type: ignore[call-arg]  # written to
            try:
                await carry(socket, call.read, call.write, self.begin.session, self.traffic)
            finally:
                call.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EdgeError):
            _log.debug("a connection to %s has ended", self.name)
        finally:
            socket[1].transport.abort()

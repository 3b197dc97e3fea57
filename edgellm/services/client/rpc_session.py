"""A session of the RPC engine at a worker, as the client sees it: a port of this machine that leads to its server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import grpc
import grpc.aio
import psutil

from edgellm.engine.ggml_rpc.backend import HOST
from edgellm.engine.native import VERSION
from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, ProtocolError
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, network_loop, run_in_network_loop
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc.versions import check_version, parse_message
from edgellm.services.client.connection import PeerWatch
from edgellm.services.client.stage_client import Endpoint, explained
from edgellm.services.mesh_codec import lost
from edgellm.services.rpc_tunnel import (
    OFFER,
    RPC_ENGINE,
    SERVE,
    SESSION_BYTES,
    TUNNEL,
    Socket,
    StreamTraffic,
    carry,
    ended,
)

_log = logging.getLogger(__name__)
_STARTING_SECONDS = 90.0  # limit for a server to start
SILENT_BEATS = 12
"""Heartbeats without a message after which a device is lost."""


@dataclass(frozen=True, slots=True)
class RpcOffer:
    """A device's offer: its server in words, and its `memory` for layers; `cached`: bytes of this device's weights that
    it keeps. `unit` as in `Figures`."""

    server: str
    memory: int
    unit: str
    cached: int


def ask_offer(endpoint: Endpoint) -> RpcOffer:
    """Ask a worker whether it serves llama.cpp's RPC.

    Raises:
        DeviceLost: it does not answer, or has no server; says what to do.
        ProtocolError, PeerTooOld, PeerTooNew: it has another version.
    """
    return run_in_network_loop(_offer(endpoint)).result()


async def _offer(endpoint: Endpoint) -> RpcOffer:
    reply = parse_message(pb.OfferReply, await endpoint.ask(OFFER, pb.OfferRequest(protocol=RPC_ENGINE)))
    check_version(reply.protocol, RPC_ENGINE, endpoint.name)
    if not reply.server:
        raise DeviceLost(
            f"{endpoint.name} has no RPC server of llama.cpp.", "Run edgellm doctor there; it says how to compile one."
        )
    if reply.version not in ("", VERSION):
        raise ProtocolError(
            f"{endpoint.name} has llama-cpp-python {reply.version[:40]}, but this device has {VERSION}.",
            "Install the same version on both devices.",
        )
    return RpcOffer(reply.server[:200], reply.memory, reply.unit[:100], reply.cached)


class RpcSession:
    """An RPC server at a worker, and the port of this machine through which one process reaches it by mutual TLS.

    Any thread may use it. When the worker or its server is lost, all connections are closed at once.
    """

    def __init__(self, endpoint: Endpoint, *, memory: int, weights: int, model: str, beat: float = HEARTBEAT_SECONDS):
        """Set up a session for a part of `model` that takes `memory` bytes there, `weights` of them of tensors."""
        self.endpoint, self._name = endpoint, endpoint.name
        self._begin = pb.Begin(
            protocol=RPC_ENGINE, session=os.urandom(SESSION_BYTES), memory=memory, weights=weights, name=model
        )
        self._watch = PeerWatch(beat, SILENT_BEATS + 1, inf)
        self._client: int | None = None
        self._orders: asyncio.Queue[pb.RpcOrder | None] = asyncio.Queue()
        self._blamed: asyncio.Queue[EdgeError] = asyncio.Queue()
        self._traffic = StreamTraffic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._live: Future[None] | None = None
        self._lost: Future[EdgeError] = Future()

    @property
    def name(self) -> str:
        return self._name

    @property
    def lost(self) -> Future[EdgeError]:
        """Return the reason why the session ended by itself, once it has."""
        return self._lost

    @property
    def traffic(self) -> StreamTraffic:
        """Return the bytes to the server and back."""
        return self._traffic

    def open(self) -> int:
        """Have the worker start a server; return the port of this machine that leads there.

        Raises:
            DeviceLost: the device is not reached, or refuses.
        """
        serving: Future[int] = Future()
        self._live = run_in_network_loop(self._run(serving))
        return serving.result()

    def admit(self, process: int) -> None:
        """Let a process connect, and no other. Without one, nobody may."""
        self._client = process

    def confirm(self) -> None:
        """Tell the worker that the model is loaded, so that it may keep the weights."""
        network_loop().call_soon_threadsafe(self._orders.put_nowait, pb.RpcOrder(whole=pb.Whole()))

    def blame(self, error: EdgeError) -> None:
        """End the session for a reason that is known here alone; it is then `lost`."""
        network_loop().call_soon_threadsafe(self._blamed.put_nowait, error)

    def close(self) -> None:
        """End the session, and the server with it."""
        if self._live is not None and not self._live.done():
            network_loop().call_soon_threadsafe(self._orders.put_nowait, None)
            with suppress(Exception):
                self._live.result()

    async def _run(self, serving: Future[int]) -> None:
        channel: grpc.aio.Channel | None = None
        listener: asyncio.Server | None = None
        closed = False
        error: EdgeError = lost("the connection to it is closed.")
        try:
            async with asyncio.timeout(2 * HELLO_SECONDS):
                channel = await self.endpoint.connect()
            call = channel.stream_stream(SERVE, bytes, bytes)()  # type: ignore[call-arg]  # written to
            await call.write(pb.RpcOrder(begin=self._begin).SerializeToString())
            async with asyncio.timeout(_STARTING_SECONDS):
                await self._next(call, "serving")
            tunnelled = channel

            def connected(socket: Socket) -> None:
                self._task(self._tunnel(tunnelled, socket)).add_done_callback(
                    lambda _: socket.abort()  # even if the task is cancelled before it begins
                )

            listener = await asyncio.get_running_loop().create_server(lambda: Socket(connected), HOST, 0)
            serving.set_result(listener.sockets[0].getsockname()[1])
            every = self._read(call), self._write(call), self._beats(), self._fail()
            works = [asyncio.ensure_future(one) for one in every]
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            closed = works[1] in done and works[1].exception() is None
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            for work in done:
                work.result()
        except TimeoutError:
            error = lost(f"{self.name} at {self.endpoint.address} does not answer.")
        except grpc.aio.AioRpcError as failed:
            error = lost(f"{self.name}: {explained(failed)}")
        except EdgeError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 - it would go unreported otherwise
            _log.exception("the RPC session at %s", self.endpoint.address)
            error = lost(f"{self.name}: {failed!r}.")
        finally:
            await self._end(channel, listener)
        if not serving.done():
            serving.set_exception(error)
        if not closed:
            self._lost.set_result(error)

    async def _end(self, channel: grpc.aio.Channel | None, listener: asyncio.Server | None) -> None:
        if listener is not None:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if channel is not None:
            await channel.close(None)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _next(self, call: Any, kind: str) -> None:
        data = await call.read()
        if ended(data):
            await call.code()
            raise lost(f"{self.name} has ended the session: {await call.details() or 'without a word'}.")
        self._watch.heard()
        if parse_message(pb.RpcReport, data).WhichOneof("report") != kind:
            raise ProtocolError(f"{self.name} sends another report than {kind!r}.", SAME_VERSION)

    async def _read(self, call: Any) -> None:
        while True:
            await self._next(call, "beat")

    async def _write(self, call: Any) -> None:
        """Send orders until the session is closed; the reader reports a broken stream."""
        while (order := await self._orders.get()) is not None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(order.SerializeToString())
        call.cancel()

    async def _beats(self) -> None:
        """Raise DeviceLost after heartbeats without a word."""
        watch = self._watch
        while not watch.trouble(0.0):
            await asyncio.sleep(watch.beat)
        raise lost(f"{self.name} at {self.endpoint.address} has stopped responding.")

    async def _fail(self) -> None:
        raise await self._blamed.get()

    async def _tunnel(self, channel: grpc.aio.Channel, socket: Socket) -> None:
        try:
            if not await asyncio.to_thread(_is_of, self._client, socket.peer_port):
                _log.warning("refused a connection to %s from another process", self.name)
                return
            call = channel.stream_stream(TUNNEL, bytes, bytes)()  # type: ignore[call-arg]  # written to
            try:
                await carry(socket, call.read, call.write, self._begin.session, self._traffic)
            finally:
                call.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EdgeError):
            _log.debug("a connection to %s has ended", self.name)


def _is_of(process: int | None, port: int) -> bool:
    """Return whether a connection from a port of this machine is of that process."""
    if process is None:
        return False
    try:
        return any(at.laddr.port == port for at in psutil.Process(process).net_connections(kind="tcp"))
    except psutil.Error:
        return False


class RpcWorker:
    """A worker that serves llama.cpp's RPC, as an `RpcDevice`."""

    def __init__(self, endpoint: Endpoint, beat: float = HEARTBEAT_SECONDS) -> None:
        self.endpoint, self._beat = endpoint, beat

    @property
    def name(self) -> str:
        return self.endpoint.name

    def free_memory(self) -> int:
        return ask_offer(self.endpoint).memory

    def rpc_session(self, *, memory: int, weights: int, model: str) -> RpcSession:
        return RpcSession(self.endpoint, memory=memory, weights=weights, model=model, beat=self._beat)

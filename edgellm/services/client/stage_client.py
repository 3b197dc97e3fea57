"""A stage on another device, as the coordinator sees it; and the endpoints of workers by names and addresses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import grpc
import grpc.aio
from google.protobuf.message import Message

from edgellm.coldstart.hardware import Device, LayersOnDevice
from edgellm.errors import (
    SAME_VERSION,
    DeviceLost,
    EdgeError,
    EngineFailed,
    InvalidOption,
    LayersRefused,
    NotPaired,
    NotPermitted,
    ProtocolError,
)
from edgellm.layer_range import HERE, LayerRange
from edgellm.mesh.fleet_profiler import parse_peer
from edgellm.mesh.messages import AnswerDue, Order, StageLost, StageSpec
from edgellm.mesh.pipeline import Post, StageHost
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, network_loop, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.peer_probe import probe_peers
from edgellm.rpc.discovery.workers import Worker
from edgellm.rpc.layers.codec import read_pieces, write_pieces
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.protos.layers_pb2 import Piece
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import parse_message
from edgellm.services.client.connection import PeerWatch
from edgellm.services.client.verifier_selection import trust_for
from edgellm.services.mesh_codec import (
    ENGINE,
    HOLDS,
    MESH,
    WORK,
    lost,
    read_event,
    write_order,
    write_work,
)
from edgellm.spec.verifier import VerifyRequest
from edgellm.storage.layers.manifest import LayerPiece

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """A device is lost after `silent_beats` heartbeats without a message, or when it has work but makes no progress for
    `stall` seconds: no byte loaded, no block computed. This process counts the beats, so that a suspended coordinator
    blames no device."""

    beat: float = HEARTBEAT_SECONDS
    silent_beats: int = 12
    stall: float = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's address, and how to connect: with `trust` by mutual TLS, only to `device` if that is known."""

    name: str
    address: Address
    trust: Trust | None = None
    device: DeviceID | None = None

    async def connect(self) -> grpc.aio.Channel:
        if self.trust is None:
            return open_channel(self.address)
        return (await connect_authenticated(self.address, self.trust, self.device, HELLO_SECONDS))[0]

    async def ask(self, method: str, request: Message) -> bytes:
        """Return a worker's answer to one request. Raise DeviceLost without an answer."""
        channel: grpc.aio.Channel | None = None
        try:
            async with asyncio.timeout(2 * HELLO_SECONDS):
                channel = await self.connect()
                answer: bytes = await channel.unary_unary(method, None, bytes)(request.SerializeToString())
                return answer
        except TimeoutError:
            raise lost(f"{self.name} at {self.address} does not answer.") from None
        except grpc.aio.AioRpcError as error:
            raise lost(f"{self.name} at {self.address}: {explained(error)}") from None
        finally:
            if channel is not None:
                await channel.close(None)


OwnPieces = Callable[[Collection[LayerRange]], Sequence[LayerPiece]]
"""Returns the known pieces of this device's own model file, and the pieces of the given layers."""


class RemoteDevice:
    """The `MeshDevice` of a worker, which may hold a part of the model."""

    def __init__(
        self, endpoint: Endpoint, timeouts: Timeouts | None = None, *, direct: bool = True,
        known: Device | None = None, own: OwnPieces = lambda _wanted: (),
    ) -> None:  # fmt: skip
        """Set up the device. `direct`: its stage may send rows to the next device itself, if that can be reached.
        `known`: the device as it was measured. Pieces that were deployed to the worker count if they are among the
        `own` pieces."""
        self.endpoint, self._timeouts, self._direct = endpoint, timeouts or Timeouts(), direct
        self.name = endpoint.name
        self._known, self._own = known or Device.unmeasured(endpoint.name), own

    def describe(self, model: str) -> Device:
        """Return the worker as it is now. Raise DeviceLost if it does not answer."""
        known = self._own(())
        reply = run_in_network_loop(self._holds(model, known)).result()
        layers = {piece.layers for piece in _read(reply.brought)} - {piece.layers for piece in known}
        if layers:  # hashes come from this device's own file: only pieces of that very file are used
            reply = run_in_network_loop(self._holds(model, self._own(layers))).result()
        return self._described(reply)

    def stage_host(self) -> RemoteStageHost:
        return RemoteStageHost(self.endpoint, self._timeouts, self._direct, self._own(()))

    async def _holds(self, model: str, pieces: Sequence[LayerPiece]) -> pb.HoldsReply:
        request = pb.HoldsRequest(protocol=MESH, model=bytes.fromhex(model), pieces=write_pieces(pieces))
        reply = parse_message(pb.HoldsReply, await self.endpoint.ask(HOLDS, request))
        if reply.protocol != MESH:
            raise ProtocolError(
                f"{self.name} speaks mesh version {reply.protocol}, but this device speaks version {MESH}.",
                SAME_VERSION,
            )
        if reply.version != ENGINE:
            raise ProtocolError(
                f"{self.name} has llama-cpp-python {reply.version[:40]}, but this device has {ENGINE}.",
                "Install the same version on both devices.",
            )
        return reply

    def _described(self, reply: pb.HoldsReply) -> Device:
        bounded = bool(reply.begins or reply.ends)  # without either, a stage there may begin and end anywhere
        layers = LayersOnDevice(
            frozenset(reply.layers), frozenset(reply.warm),
            frozenset(reply.begins) if bounded else None, frozenset(reply.ends) if bounded else None,
        )  # fmt: skip
        return self._known.updated(layers, float(reply.memory), reply.unit)


class RemoteStageHost:
    """The `StageHost` of one stage at a worker."""

    def __init__(
        self, endpoint: Endpoint, timeouts: Timeouts, direct: bool = True, pieces: Sequence[LayerPiece] = ()
    ) -> None:
        """`pieces`: pieces of the coordinator's own file, with which a worker that lacks the file may compute."""
        self.endpoint, self._direct, self._pieces = endpoint, direct, tuple(pieces)
        self.stage = os.urandom(16)
        self._orders: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._expected: dict[int, VerifyRequest] = {}
        self._work: StageSpec | None = None
        self._closed = False
        self._waiting: Callable[[], bool] = bool
        self._watch = PeerWatch(timeouts.beat, timeouts.silent_beats + 1, timeouts.stall)
        self._reports_idle, self._unsent = False, 0
        self._accepted = asyncio.Event()

    @property
    def name(self) -> str:
        return self.endpoint.name

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:
        self._work, self._waiting = work, waiting
        prepare = write_work(replace(work, pieces=self._pieces), self.stage)
        if self._direct and isinstance(after, RemoteStageHost) and after.reached_from(self.endpoint):
            prepare.next, prepare.next_stage = str(after.endpoint.address), after.stage
            prepare.next_device = b"" if after.endpoint.device is None else after.endpoint.device.digest
        run_in_network_loop(self._live(pb.Order(prepare=prepare).SerializeToString(), work, post))

    def reached_from(self, endpoint: Endpoint) -> bool:
        """Return whether a worker at `endpoint` may reach this one by the coordinator's address and protocol."""
        mine = self.endpoint
        return mine.address.loopback == endpoint.address.loopback and (mine.trust is None) == (endpoint.trust is None)

    def send(self, order: Order) -> None:
        if isinstance(order, AnswerDue):
            self._expected[order.number] = order.request
        elif self._work is not None:
            data = write_order(order, self._work.wide).SerializeToString()
            network_loop().call_soon_threadsafe(self._queue, data)

    def idle(self) -> bool:
        return self._reports_idle and not self._unsent

    def close(self) -> None:
        self._closed = True
        network_loop().call_soon_threadsafe(self._orders.put_nowait, None)

    def _queue(self, order: bytes) -> None:
        self._unsent += 1
        self._orders.put_nowait(order)

    async def _live(self, prepare: bytes, work: StageSpec, post: Post) -> None:
        lost_stage = StageLost(lost("the connection to it is closed."))
        channel = None
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(2 * HELLO_SECONDS):
                channel = await self.endpoint.connect()
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(WORK, bytes, bytes)()  # type: ignore[call-arg]
            works = (self._write(call, prepare), self._read(call, work, post), self._beats())
            tasks = [asyncio.ensure_future(one) for one in works]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError:
            lost_stage = StageLost(lost(f"no answer from {self.endpoint.address}."))
        except grpc.aio.AioRpcError as error:
            blamed = error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED)
            lost_stage = StageLost(lost(explained(error)), blamed)
        except ProtocolError as error:
            lost_stage = StageLost(lost(f"it violates the protocol: {error}"))
        except EdgeError as error:
            lost_stage = StageLost(error)
        except Exception as error:  # noqa: BLE001 - it would go unreported otherwise
            _log.exception("the stage at %s", self.endpoint.address)
            lost_stage = StageLost(EngineFailed(f"Its reports could not be handled: {error!r}.", "Report this."))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if channel is not None:
                await channel.close(None)
            if not self._closed:
                post(lost_stage)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], prepare: bytes) -> None:
        """Send orders until the end; the reader reports a broken stream. They wait for the worker to accept the stage:
        gRPC hides the reason of a refusal where an order fails to be sent meanwhile."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(prepare)
            await self._accepted.wait()
            while (data := await self._orders.get()) is not None:
                await call.write(data)
                self._unsent -= data is not _WAITING
            return
        await asyncio.Event().wait()

    async def _read(
        self, call: grpc.aio.StreamStreamCall[bytes, bytes], work: StageSpec, post: Callable[..., None]
    ) -> None:
        while isinstance(data := await call.read(), bytes):
            report = parse_message(pb.Report, data)
            self._watch.heard()
            self._accepted.set()
            if report.WhichOneof("report") == "working":
                self._progress(report)
            elif (event := read_event(report, work, self._expected)) is not None:
                if report.WhichOneof("report") == "answer":
                    self._expected.pop(report.answer.verdict.round, None)
                post(event)
        raise lost("it has ended the stage.")

    def _progress(self, report: pb.Report) -> None:
        """Record the worker's progress; an idle device need not make any."""
        idle = not report.working.round and self._work is not None and report.progress >= len(self._work.layers)
        self._reports_idle = idle
        self._watch.progress(object() if idle else (report.progress, report.working.step))

    async def _beats(self) -> None:
        self._watch.begin()
        while True:
            began = monotonic()
            await asyncio.sleep(self._watch.beat)
            if self._waiting():
                self._orders.put_nowait(_WAITING)
            if trouble := self._watch.trouble(monotonic() - began):
                raise DeviceLost(f"it {trouble}.", "Check that it is awake and reachable, and not overloaded.")


def _read(pieces: Sequence[Piece]) -> Sequence[LayerPiece]:
    with suppress(LayersRefused):
        return read_pieces(pieces)
    return ()


_WAITING = pb.Order(waiting=pb.Waiting()).SerializeToString()


def explained(error: grpc.aio.AioRpcError) -> str:
    """Return gRPC's error as a text for people."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "the server there is not a worker (start one with edgellm serve --role worker)."
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "it does not answer, or no longer does."
    return error.details() or error.code().name


def remote_devices(
    names: Sequence[str], peers: Sequence[str], discovered: Sequence[Worker], known: Mapping[str, Device],
    own: OwnPieces,
) -> dict[str, RemoteDevice]:  # fmt: skip
    """Return workers by name: the `discovered` ones, or else workers at the addresses `peers`; and all further `names`
    but `HERE`, which are addresses or names of paired devices. `known` are measured devices; `own` is as for
    `RemoteDevice`.

    Raises:
        InvalidOption, NotPermitted, NotPaired, EdgeError: a device does not answer, has granted this one no right to
            compute there, or cannot be used.
    """
    if discovered:
        endpoints = {worker.name: endpoint_of(worker) for worker in discovered}
    else:
        endpoints = {endpoint.name: endpoint for endpoint in map(_endpoint_at, peers)}
    endpoints |= _resolved([name for name in dict.fromkeys(names) if name not in (HERE, *endpoints)])
    return {name: RemoteDevice(where, known=known.get(name), own=own) for name, where in endpoints.items()}


def remote_device(worker: Worker, known: Device, own: OwnPieces) -> RemoteDevice:
    """Return a discovered worker that was measured. Raise EdgeError where it cannot be used."""
    return RemoteDevice(endpoint_of(worker), known=known, own=own)


def endpoint_of(worker: Worker) -> Endpoint:
    """Return the endpoint of a discovered worker. Raise EdgeError where it cannot be used."""
    if worker.address is None:
        raise worker.error or NotPaired(
            f"The address of {worker.name} is unknown.", "Check that it is switched on and runs edgellm serve."
        )
    if worker.peer is None:
        return Endpoint(worker.name, worker.address)
    return Endpoint(worker.name, worker.address, Trust.load(), worker.peer.id)


def _endpoint_at(text: str) -> Endpoint:
    name, address = parse_peer(text)
    return Endpoint(name or str(address), address, trust_for(address))


def _resolved(names: Sequence[str]) -> dict[str, Endpoint]:
    """Return the endpoints of devices, given an address or a paired device's name each. Paired ones are all asked at
    once."""
    found = {name: _endpoint_at(name) for name in names if ":" in name}
    paired = [name for name in names if name not in found]
    if not paired:
        return found
    trust = Trust.load()
    for name, answer in zip(
        paired, probe_peers(trust, list(map(trust.peers.find, paired)), chosen_hosts()), strict=True
    ):
        if answer.info is None:
            raise answer.error or InvalidOption(
                f"{name} does not answer.", f"Give its address: --peer {name}=HOST:PORT"
            )
        if Right.COMPUTE not in answer.info.rights:
            raise NotPermitted(
                f"{name} does not allow this device to have layers computed there.",
                f"To allow it, run there: edgellm peers grant {trust.identity.id.short} compute",
            )
        found[name] = Endpoint(name, answer.info.address, trust, answer.peer.id)
    return found

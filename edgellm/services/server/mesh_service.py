"""The worker's side of `mesh.proto`: a stage for each coordinator that asks, and the stream to the next stage."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from edgellm.engine.native import VERSION
from edgellm.errors import SAME_VERSION, EdgeError, LayersMissing, ProtocolError
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageLost, StageSpec
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, first_of
from edgellm.rpc.discovery.peer_probe import is_local_caller, may_dial, uniform_failure
from edgellm.rpc.layers import read_pieces, write_pieces
from edgellm.rpc.protos import PROTOCOL, parse_message
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.handshake import AuthInterceptor, dial
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.services import mesh_codec
from edgellm.services.server import listener
from edgellm.sleeping import AWAKE
from edgellm.storage.layer_pieces import LayerPiece

CONNECT_SECONDS = 15.0  # the next stage may have to be prepared first
MEET_SECONDS = 10.0  # the preceding stage's wait until the coordinator has prepared this one
_INDIRECT = "The coordinator forwards micro-batches."


class StageEnded(EdgeError):
    """A stage ends, and its device is not at fault: it is not used, or the next stage cannot be reached."""

    rpc_status = "ABORTED"


class StageForwarder:
    """Sends micro-batches to the next stage, which `prepare` names. It connects in the background."""

    def __init__(self, prepare: pb.Prepare, trust: Trust | None, local: bool) -> None:
        """`local`: the coordinator is on this machine, so the next stage may be on loopback."""
        self._prepare, self._trust, self._local = prepare, trust, local
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._connecting = asyncio.create_task(self._connect())

    async def connected(self) -> bool:
        return await asyncio.shield(self._connecting)

    async def send(self, batch: pb.MeshParcel) -> None:
        """Send a micro-batch to the next stage. Raise StageEnded."""
        try:
            if self._call is not None:
                await self._call.write(pb.Carried(parcel=batch).SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise StageEnded(
                f"The connection to the next stage at {self._prepare.next} was lost.", "Prepare the stage again."
            ) from None

    def close(self) -> None:
        """Cancel the stream, and close the channel in the background."""
        self._connecting.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            self._closing = asyncio.ensure_future(self._channel.close(None))

    async def _connect(self) -> bool:
        unreachable = StageEnded("The next stage cannot be reached.", _INDIRECT)
        with suppress(EdgeError):
            address = self._address()
            hidden = uniform_failure(self._local or self._trust is None, unreachable)
            async with hidden, asyncio.timeout(CONNECT_SECONDS):
                device = DeviceID(self._prepare.next_device) if self._prepare.next_device else None
                self._channel = await dial(address, self._trust, device)
                call = self._channel.stream_stream(mesh_codec.CARRY, bytes, bytes)()  # type: ignore[call-arg]  # written to
                meeting = pb.Meeting(protocol=self._prepare.protocol, stage=self._prepare.next_stage)
                await call.write(pb.Carried(meeting=meeting).SerializeToString())
                if isinstance(await call.read(), bytes):
                    self._call = call
                    return True
                raise unreachable
        if self._channel is not None:
            channel, self._channel = self._channel, None
            with suppress(grpc.aio.AioRpcError):
                await channel.close(None)
        return False

    def _address(self) -> Address:
        """Return the address of the next stage. Raises StageEnded: this device does not know it to be there."""
        asked, device = Address.parse(self._prepare.next), bytes(self._prepare.next_device)
        peers = [] if self._trust is None else self._trust.peers.all()
        known = (may_dial(peer, asked, self._local) for peer in peers if not device or peer.id.digest == device)
        if self._trust is None or any(known):
            return asked
        raise StageEnded(f"No paired device is known at {asked}.", _INDIRECT)


@dataclass(slots=True, eq=False)
class _ServedStage:
    """A stage, the events that wait for its coordinator, and the lock of the stream to it: gRPC writes one message at a
    time."""

    stage: Stage
    out: asyncio.Queue[Event]
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def report(self, stream: listener.Stream, report: pb.Report) -> None:
        async with self.writing:
            await listener.write_in_time(stream, report)

    def put(self, message: pb.MeshParcel) -> None:
        """Queue a micro-batch. An invalid one fails alone, because the stage has other sessions."""
        try:
            self.stage.put(mesh_codec.read_micro_batch(message, self.stage.work))
        except EdgeError as error:
            self.out.put_nowait(Failed(message.number, error))


class WorkerService(listener.Service):
    """The calls of `mesh.proto`."""

    contract, right, over = mesh_codec.CONTRACT, Right.COMPUTE, "A stage has ended"

    def __init__(
        self, cache: WeightCache, notify: listener.Notify, guard: AuthInterceptor | None, trust: Trust | None,
        stored: StoredLayers | None = None,
    ) -> None:  # fmt: skip
        """`stored` are the `cache`'s layers that other devices uploaded."""
        super().__init__(notify, guard)
        self._cache, self._stored, self._trust = cache, stored, trust
        self._stages: dict[bytes, _ServedStage] = {}
        self._changed = asyncio.Condition()

    async def holds(self, data: bytes, _context: listener.Stream) -> pb.HoldsReply:
        request = parse_message(pb.HoldsRequest, data)
        return await asyncio.to_thread(self._holds, request.model.hex(), read_pieces(request.pieces))

    def _holds(self, file: str, pieces: Sequence[LayerPiece]) -> pb.HoldsReply:
        memory, _ = self._cache.available()
        reply = pb.HoldsReply(protocol=PROTOCOL, memory=memory, version=VERSION, unit=self._cache.unit.name)
        if (model := self._cache.layers.open(file, pieces)) is not None:
            reply.layers.extend(sorted(model.held))
            reply.warm.extend(sorted(self._cache.warm(model)))
            reply.begins.extend(piece.start for piece in model.pieces or ())
            reply.ends.extend(piece.last for piece in model.pieces or ())
            cut = [] if model.cut is None else [end for piece in model.cut() for end in (piece.start, piece.stop)]
            reply.MergeFrom(pb.HoldsReply(whole=model.cut is not None, cut=cut))
        if self._cache.layers.open(file) is None:  # pieces are needed only without the file
            reply.brought.extend(write_pieces(sorted(self._uploaded_pieces(file))))
        return reply

    def _uploaded_pieces(self, file: str) -> Collection[LayerPiece]:
        return () if self._stored is None else self._stored.store.pieces(file)

    def _stage(self, work: StageSpec, post: Callable[[Event], None]) -> Stage:
        """Return a stage, which may wait for memory. Raise LayersMissing if the model's deployed layers do not match
        the coordinator's file, and as `Stage` does."""
        if self._cache.layers.open(work.model, work.pieces) is None and self._uploaded_pieces(work.model):
            raise LayersMissing(
                f"The layers of {work.name} that were deployed to this device do not match the coordinator's file.",
                "Deploy the coordinator's layers: edgellm mesh deploy",
            )
        return Stage(work, self._cache, post)

    async def work(self, _orders: Any, stream: listener.Stream) -> None:
        """Serve one stage, from Prepare to the end of the stream."""
        first = await listener.next_message(stream, pb.Order)
        if first is None or first.WhichOneof("order") != "prepare":
            raise ProtocolError("The first order is not Prepare.", SAME_VERSION)
        prepare, work = first.prepare, mesh_codec.read_work(first.prepare)
        loop = asyncio.get_running_loop()
        out: asyncio.Queue[Event] = asyncio.Queue()

        def post(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended with the process
                loop.call_soon_threadsafe(out.put_nowait, event)

        what = f"{work.layers.named} of {work.name}"
        stage = await listener.in_thread(lambda: self._stage(work, post), undo=lambda made: made.close())
        served, forwarder = _ServedStage(stage, out), None
        try:
            self._notify(f"Loading {what} for {stream.peer()}.")
            if prepare.next and not work.ends:
                forwarder = StageForwarder(prepare, self._trust, is_local_caller(stream))
            stage.start()
            async with self._registered(prepare.stage, served):
                await first_of(
                    self._orders(served, stream), self._reports(served, forwarder, stream), self._beats(served, stream)
                )
        finally:
            if forwarder is not None:
                forwarder.close()
            await self.released(what, stage.close)

    async def carry(self, _parcels: Any, stream: listener.Stream) -> None:
        first = await listener.next_message(stream, pb.Carried)
        if first is None or first.WhichOneof("carried") != "meeting" or first.meeting.protocol != PROTOCOL:
            raise ProtocolError("The first parcel is not a Meeting.", SAME_VERSION)
        served = await self._served(first.meeting.stage)
        await stream.write(pb.Met().SerializeToString())
        while (frame := await listener.next_message(stream, pb.Carried)) is not None:
            served.put(frame.parcel)

    async def _served(self, name: bytes) -> _ServedStage:
        """Return the stage of this name, once its coordinator has prepared it."""
        try:
            async with asyncio.timeout(MEET_SECONDS), self._changed:
                await self._changed.wait_for(lambda: name in self._stages)
        except TimeoutError:
            raise ProtocolError("No such stage is prepared on this device.", SAME_VERSION) from None
        return self._stages[name]

    @asynccontextmanager
    async def _registered(self, name: bytes, served: _ServedStage) -> AsyncIterator[None]:
        if name in self._stages:
            raise ProtocolError("The stage was prepared twice.", SAME_VERSION)
        async with self._changed:
            self._stages[name] = served
            self._changed.notify_all()
        try:
            yield
        finally:
            self._stages.pop(name, None)

    async def _orders(self, served: _ServedStage, stream: listener.Stream) -> None:
        while (order := await listener.next_message(stream, pb.Order)) is not None:
            match order.WhichOneof("order"):
                case "parcel":
                    served.put(order.parcel)
                case "tell":
                    served.stage.trace()
                case "waiting":
                    served.stage.touch()
                case _:
                    raise ProtocolError("The stage was prepared twice, or an order is empty.", SAME_VERSION)

    async def _reports(self, served: _ServedStage, forwarder: StageForwarder | None, stream: listener.Stream) -> None:
        """Send the stage's events: rows to the next stage if it can be reached, all else to the coordinator."""
        half = served.stage.work.half
        while True:
            event = await served.out.get()
            if isinstance(event, StageLost):
                raise event.error
            if isinstance(event, MicroBatch) and forwarder is not None and await forwarder.connected():
                await forwarder.send(mesh_codec.write_micro_batch(event, half))
            elif (report := mesh_codec.write_event(event, half)) is not None:
                await served.report(stream, report)

    async def _beats(self, served: _ServedStage, stream: listener.Stream) -> None:
        """Send heartbeats, as long as the stage is used."""
        while served.stage.idle <= self._cache.keep:
            await served.report(stream, mesh_codec.write_working(served.stage.progress))
            if served.stage.idle <= 2 * HEARTBEAT_SECONDS:
                AWAKE.touch()
            await asyncio.sleep(HEARTBEAT_SECONDS)
        raise StageEnded(f"There was no request for {self._cache.keep:g} seconds.", "Prepare the stage again.")

"""The worker's side of `mesh.proto`: one stage for each coordinator that asks, and its line to the next stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from edgellm.errors import (
    DeviceStuck,
    DiskFull,
    EdgeError,
    EngineFailed,
    LayersMissing,
    MemoryShort,
    ProtocolError,
    StoreFull,
)
from edgellm.mesh.layer_sources import StoredLayers, known_as
from edgellm.mesh.messages import Event, Failed, Forward, StageLost, StageSpec
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, TAKE_SECONDS, open_channel
from edgellm.rpc.lines import alike, on_this_machine, places_of
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Method
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import meet
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import parsed
from edgellm.services.mesh_codec import ENGINE, MESH, read_parcel, read_work, write_event, write_parcel, write_working
from edgellm.services.server.verification_service import Happened, ServerEvent
from edgellm.storage.layers.manifest import Recipe

MET_SECONDS = 15.0  # the next stage may wait for its coordinator first
_CARRY = "/edgellm.v1.Mesh/Carry"


class LineBroken(EdgeError):
    """The next stage was met, and cannot be reached any more."""


class StageForwarder:
    """To the stage that `prepare` names. It is met in the background; until that is decided, parcels wait."""

    def __init__(self, prepare: pb.Prepare, trust: Trust | None, near: bool) -> None:
        """`near`: the coordinator is on this machine, so it may have this device dial on loopback."""
        self._prepare, self._trust, self._near = prepare, trust, near
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._meeting = asyncio.create_task(self._meet())

    async def met(self) -> bool:
        """Return whether the next stage was reached; if not, the coordinator has to pass parcels on from now on."""
        return await asyncio.shield(self._meeting)

    async def send(self, parcel: pb.MeshParcel) -> None:
        """Send a parcel to the next stage. Raises LineBroken."""
        try:
            if self._call is not None:
                await self._call.write(pb.Carried(parcel=parcel).SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise LineBroken(f"The next stage at {self._prepare.next} is gone.", "Prepare the stage again.") from None

    def hang_up(self) -> None:
        """Cancel the stream, and close the channel in the background."""
        self._meeting.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            self._closing = asyncio.ensure_future(self._channel.close(None))

    async def _meet(self) -> bool:
        nobody = LineBroken("The next stage cannot be reached.", "The coordinator passes on.")
        with suppress(EdgeError):
            place = self._place()
            async with alike(self._near or self._trust is None, _ERRORS, nobody), asyncio.timeout(MET_SECONDS):
                self._channel = await self._dial(place)
                call = self._channel.stream_stream(_CARRY, bytes, bytes)()  # type: ignore[call-arg]  # written to
                meeting = pb.Meeting(protocol=self._prepare.protocol, stage=self._prepare.next_stage)
                await call.write(pb.Carried(meeting=meeting).SerializeToString())
                if isinstance(await call.read(), bytes):
                    self._call = call
                    return True
                raise nobody
        if self._channel is not None:
            channel, self._channel = self._channel, None
            with suppress(grpc.aio.AioRpcError):
                await channel.close(None)
        return False

    def _place(self) -> Address:
        """Return the address of the next stage.

        Raises:
            LineBroken: this device does not know it to be there; then the coordinator passes on.
        """
        asked, device = self._prepare.next, bytes(self._prepare.next_device)
        if self._trust is None:
            return Address.parse(asked)
        peers = [peer for peer in self._trust.peers.all() if not device or peer.id.digest == device]
        for place in (place for peer in peers for place in places_of(peer, asked, self._near)):
            if str(place) == asked:
                return place
        raise LineBroken(f"No paired device is known to be at {asked}.", "The coordinator passes on.")

    async def _dial(self, place: Address) -> grpc.aio.Channel:
        if self._trust is None:
            return open_channel(place)
        device = DeviceID(self._prepare.next_device) if self._prepare.next_device else None
        return (await meet(place, self._trust, device, HELLO_SECONDS))[0]


_ERRORS = (EdgeError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ValueError)


_SERVICE = pb.DESCRIPTOR.services_by_name["Mesh"]
SERVICE = _SERVICE.full_name
HOLDS, WORK, CARRY = (f"/{SERVICE}/{name}" for name in ("Holds", "Work", "Carry"))
_SETTLE_SECONDS = 1.0
MEET_SECONDS = 10.0  # how long the stage before is kept waiting until the coordinator has prepared this one

Stream: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
M = TypeVar("M", bound=Message)


@dataclass(slots=True, eq=False)
class _Seated:
    """A stage, and what waits for its coordinator."""

    stage: Stage
    out: asyncio.Queue[Event | None]


class WorkerService:
    """The calls of `mesh.proto`. Lives in one event loop."""

    def __init__(
        self,
        shelf: WeightCache,
        *,
        threads: int | None,
        tell: Callable[[ServerEvent], None],
        trust: Trust | None,
        guard: AuthInterceptor | None,
        stored: StoredLayers | None = None,
    ) -> None:
        """With a `guard`, answer only paired devices with the right to compute here. `stored` are the layers on the
        `shelf` that other devices brought."""
        self._shelf, self._threads, self._tell, self._stored = shelf, threads, tell, stored
        self._trust, self._guard = trust, guard
        self._stages: dict[bytes, _Seated] = {}
        self._arrived = asyncio.Condition()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handler for `grpc.aio.Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Holds": grpc.unary_unary_rpc_method_handler(
                    self._guarded(self.holds), pb.HoldsRequest.FromString, pb.HoldsReply.SerializeToString
                ),
                "Work": grpc.stream_stream_rpc_method_handler(self._guarded(self.work)),
                "Carry": grpc.stream_stream_rpc_method_handler(self._guarded(self.carry)),
            },
        )

    def _guarded(self, method: Method) -> Any:
        return method if self._guard is None else self._guard.over(method, Right.COMPUTE)

    async def holds(self, request: pb.HoldsRequest, _context: Stream) -> pb.HoldsReply:
        """Reply with the layers of a model that are here."""
        layers, file, recipe = self._shelf.layers, request.model.hex(), request.recipe.hex()
        model = await asyncio.to_thread(known_as, layers, file, recipe)
        held, bounds = await asyncio.to_thread(lambda: (layers.held(model), layers.bounds(model)))
        brought = await asyncio.to_thread(self._brought, file)
        anywhere = bounds.begins == bounds.ends == held
        return pb.HoldsReply(
            protocol=MESH, layers=sorted(held), warm=sorted(self._shelf.warm(model)), memory=self._shelf.left,
            version=ENGINE, begins=[] if anywhere else sorted(bounds.begins),
            ends=[] if anywhere else sorted(bounds.ends), brought=bool(brought),
        )  # fmt: skip

    def _brought(self, file: str) -> Sequence[Recipe]:
        return () if self._stored is None else self._stored.store.recipes(file)

    def _bound(self, work: StageSpec) -> StageSpec:
        """Return the work with `model` replaced by the name under which the layers are known here.

        Raises:
            LayersMissing: what was brought for this model is not what the coordinator's own file gives.
        """
        model = known_as(self._shelf.layers, work.model, work.recipe)
        if not self._shelf.layers.held(model) and (others := self._brought(work.model)):
            named = f"the recipe {work.recipe[:16]}" if work.recipe else "no recipe"
            raise LayersMissing(
                f"The layers of {work.name} that were brought to this device are those of the recipe"
                f" {others[0].digest[:16]}, and the coordinator names {named}.",
                "Bring those of the coordinator's own file: edgellm mesh deploy",
            )
        return replace(work, model=model)

    async def work(self, _orders: Any, stream: Stream) -> None:
        """Serve one stage, from Prepare to the end of the stream."""
        try:
            await self._stage(stream)
        except EdgeError as error:
            self._tell(ServerEvent(Happened.FAILED, f"A stage has ended: {error.what}"))
            await stream.abort(_STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error))

    async def _stage(self, stream: Stream) -> None:
        first = await _next(stream, pb.Order)
        if first is None or first.WhichOneof("order") != "prepare":
            raise ProtocolError("A stage begins with something else than Prepare.", _UPDATE)
        prepare = first.prepare
        work = await asyncio.to_thread(self._bound, read_work(prepare))
        loop = asyncio.get_running_loop()
        out: asyncio.Queue[Event | None] = asyncio.Queue()

        def post(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended with the process
                loop.call_soon_threadsafe(out.put_nowait, event)

        what = f"layers {work.layers} of {work.name}"
        stage = await self._made(work, post)
        line: StageForwarder | None = None
        try:
            self._tell(ServerEvent(Happened.CONNECTED, f"Loading {what} for {stream.peer()}."))
            line = (
                StageForwarder(prepare, self._trust, on_this_machine(stream))
                if prepare.next and not work.ends
                else None
            )
            stage.start()
            async with self._known(prepare.stage, _Seated(stage, out)):
                coordinator = _Coordinator(stream)
                try:
                    await _first_of(
                        self._orders(stage, post, stream),
                        self._reports(stage, line, out, coordinator),
                        self._alive(stage, coordinator),
                    )
                finally:
                    await coordinator.settle()
        finally:
            closing = asyncio.ensure_future(asyncio.to_thread(stage.close))
            if line is not None:
                line.hang_up()
            closing.add_done_callback(lambda _: self._tell(ServerEvent(Happened.ENDED, f"Done with {what}.")))
            await asyncio.shield(closing)

    async def _made(self, work: StageSpec, post: Callable[[Event], None]) -> Stage:
        """Create a stage, which may wait for memory; if the call is cancelled, close the stage once it is made."""
        making = asyncio.ensure_future(asyncio.to_thread(Stage, work, self._shelf, post, threads=self._threads))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_given_up)
            raise

    async def carry(self, _parcels: Any, stream: Stream) -> None:
        """Take in parcels from the stage before."""
        try:
            first = await _next(stream, pb.Carried)
            if first is None or first.WhichOneof("carried") != "meeting" or first.meeting.protocol != MESH:
                raise ProtocolError("Parcels come without a meeting.", _UPDATE)
            seated = await self._seated(first.meeting.stage)
            await stream.write(pb.Met().SerializeToString())
            while (frame := await _next(stream, pb.Carried)) is not None:
                _put(seated.stage, frame.parcel, seated.out.put_nowait)
        except EdgeError as error:
            await stream.abort(_STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error))

    async def _seated(self, name: bytes) -> _Seated:
        """Return the stage of this name, once its coordinator has prepared it."""
        try:
            async with asyncio.timeout(MEET_SECONDS), self._arrived:
                await self._arrived.wait_for(lambda: name in self._stages)
        except TimeoutError:
            raise ProtocolError("Nobody has prepared such a stage here.", _UPDATE) from None
        return self._stages[name]

    @asynccontextmanager
    async def _known(self, name: bytes, seated: _Seated) -> AsyncIterator[None]:
        if name in self._stages:
            raise ProtocolError("A stage is prepared twice.", _UPDATE)
        async with self._arrived:
            self._stages[name] = seated
            self._arrived.notify_all()
        try:
            yield
        finally:
            self._stages.pop(name, None)

    async def _orders(self, stage: Stage, post: Callable[[Event], None], stream: Stream) -> None:
        while (order := await _next(stream, pb.Order)) is not None:
            kind = order.WhichOneof("order")
            if kind == "parcel":
                _put(stage, order.parcel, post)
            elif kind == "tell":
                stage.tell(order.tell.session)
            elif kind == "waiting":
                stage.touch()
            else:
                raise ProtocolError("A stage is prepared twice, or an order is empty.", _UPDATE)

    async def _reports(
        self, stage: Stage, line: StageForwarder | None, out: asyncio.Queue[Event | None], to: _Coordinator
    ) -> None:
        """Send the stage's events: rows to the next stage if it can be reached, all else to the coordinator."""
        while (event := await out.get()) is not None:
            if isinstance(event, StageLost):
                raise event.error
            if isinstance(event, Forward) and line is not None and await line.met():
                await line.send(write_parcel(event.parcel, stage.work.wide))
            elif (report := write_event(event, stage.work.wide)) is not None:
                await to.write(report)

    async def _alive(self, stage: Stage, to: _Coordinator) -> None:
        """Send signs of life, as long as the stage is used."""
        while True:
            await to.write(write_working(stage.progress))
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if stage.idle > self._shelf.keep:
                raise StageIdle(f"Nothing was asked for {self._shelf.keep:g} seconds.", "Prepare the stage again.")


def _given_up(made: asyncio.Future[Stage]) -> None:
    if made.exception() is None:
        made.result().close()


class _Coordinator:
    """The reader of a stage's reports. One report is handed out after the other: a stream has no room for two."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._turn = stream, asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def write(self, report: pb.Report) -> None:
        """Send a report. Raises DeviceStuck if the coordinator does not read it in time."""
        try:
            async with self._turn, asyncio.timeout(TAKE_SECONDS):
                self._writing = asyncio.ensure_future(self._stream.write(report.SerializeToString()))
                await asyncio.shield(self._writing)
        except TimeoutError:
            raise DeviceStuck("The coordinator does not read its stream.", "It may prepare another stage.") from None

    async def settle(self) -> None:
        """Wait for a write under way: gRPC does not end a stream while it writes its first message."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=_SETTLE_SECONDS)
            if self._writing.done() and not self._writing.cancelled():
                self._writing.exception()  # who has hung up is not told


class StageIdle(EdgeError):
    """A stage that nobody uses is given up, for its memory's sake."""


def _put(stage: Stage, message: pb.MeshParcel, post: Callable[[Event], None]) -> None:
    """Give a parcel to a stage. A parcel that breaks the rules fails by itself: the stage has other sessions."""
    try:
        stage.put(read_parcel(message, stage.work))
    except EdgeError as error:
        post(Failed(message.session, message.number, error))


async def _first_of(*works: Any) -> None:
    """Run all until one of them ends, then cancel the others; raise the error of that one."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(stream: Stream, kind: type[M]) -> M | None:
    data = await stream.read()
    if not isinstance(data, bytes):  # the end of the stream
        return None
    return parsed(kind, data)


_STATUS = {
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    LayersMissing: grpc.StatusCode.FAILED_PRECONDITION,
    MemoryShort: grpc.StatusCode.FAILED_PRECONDITION,
    StoreFull: grpc.StatusCode.FAILED_PRECONDITION,
    DiskFull: grpc.StatusCode.FAILED_PRECONDITION,
    StageIdle: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LineBroken: grpc.StatusCode.ABORTED,
    EngineFailed: grpc.StatusCode.INTERNAL,
}
_UPDATE = "Run the same version of edgellm on both sides."

"""The worker's side of `mesh.proto`: a stage for each coordinator that asks."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from edgellm.engine.native import VERSION
from edgellm.errors import SAME_VERSION, EdgeError, LayersMissing, ProtocolError
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.messages import Event, Failed, StageSpec
from edgellm.mesh.stage import Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.channel import HEARTBEAT_SECONDS, first_of
from edgellm.rpc.layers import read_pieces, write_pieces
from edgellm.rpc.protos import PROTOCOL, parse_message
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.handshake import AuthInterceptor
from edgellm.rpc.trust.trust import Right
from edgellm.services import mesh_codec
from edgellm.services.server import listener
from edgellm.sleeping import AWAKE
from edgellm.storage.layer_pieces import LayerPiece


class StageEnded(EdgeError):
    """A stage ends because it is not used; its device is not at fault."""

    rpc_status = "ABORTED"


class WorkerService(listener.Service):
    """The calls of `mesh.proto`."""

    contract, right, over = mesh_codec.CONTRACT, Right.COMPUTE, "A stage has ended"

    def __init__(
        self, cache: WeightCache, notify: listener.Notify, guard: AuthInterceptor | None,
        stored: StoredLayers | None = None,
    ) -> None:  # fmt: skip
        """`stored` are the `cache`'s layers that other devices uploaded."""
        super().__init__(notify, guard)
        self._cache, self._stored = cache, stored

    async def holds(self, data: bytes, _context: listener.Stream) -> pb.HoldsReply:
        request = parse_message(pb.HoldsRequest, data)
        return await asyncio.to_thread(self._holds, request.model.hex(), read_pieces(request.pieces))

    def _holds(self, file: str, pieces: Sequence[LayerPiece]) -> pb.HoldsReply:
        unit = self._cache.unit.name
        reply = pb.HoldsReply(protocol=PROTOCOL, memory=self._cache.available(), version=VERSION, unit=unit)
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
        work, loop = mesh_codec.read_work(first.prepare), asyncio.get_running_loop()
        out: asyncio.Queue[Event | pb.Report] = asyncio.Queue()

        def post(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended with the process
                loop.call_soon_threadsafe(out.put_nowait, event)

        what = f"{work.layers.named} of {work.name}"
        stage = await listener.in_thread(lambda: self._stage(work, post), undo=lambda made: made.close())
        try:
            self._notify(f"Loading {what} for {stream.peer()}.")
            stage.start()
            await first_of(_follow(stage, out, stream), _report(work, out, stream), self._beats(stage, out))
        finally:
            await self.released(what, stage.close)

    async def _beats(self, stage: Stage, out: "asyncio.Queue[Event | pb.Report]") -> None:
        """Have heartbeats sent, as long as the stage is used."""
        while stage.idle <= self._cache.keep:
            out.put_nowait(mesh_codec.write_working(stage.progress))
            if stage.idle <= 2 * HEARTBEAT_SECONDS:
                AWAKE.touch()
            await asyncio.sleep(HEARTBEAT_SECONDS)
        raise StageEnded(f"There was no request for {self._cache.keep:g} seconds.", "Prepare the stage again.")


async def _follow(stage: Stage, out: "asyncio.Queue[Event | pb.Report]", stream: listener.Stream) -> None:
    """Follow the orders. An invalid micro-batch fails alone, because the stage has other sessions."""
    while (order := await listener.next_message(stream, pb.Order)) is not None:
        match order.WhichOneof("order"):
            case "parcel":
                try:
                    stage.put(mesh_codec.read_micro_batch(order.parcel, stage.work))
                except EdgeError as error:
                    out.put_nowait(Failed(order.parcel.number, error))
            case "waiting":
                stage.touch()
            case _:
                raise ProtocolError("The stage was prepared twice, or an order is empty.", SAME_VERSION)


async def _report(work: StageSpec, out: "asyncio.Queue[Event | pb.Report]", stream: listener.Stream) -> None:
    """Send the stage's events and heartbeats, one at a time, as gRPC wants them."""
    while True:
        one = await out.get()
        await listener.write_in_time(
            stream, one if isinstance(one, pb.Report) else mesh_codec.write_event(one, work.half)
        )

"""The calls of `layers.proto`: store layers for other devices, list them, and measure this device."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, MeasureFailed, ProtocolError, StoreBusy
from edgellm.rpc.layers import CONTRACT, WINDOW, read_manifest, read_places, write_facts
from edgellm.rpc.measuring import MOST_SENT, DeviceFigures, frame_sizes, read_blocks, write_figures
from edgellm.rpc.protos import check_version, parse_message
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.handshake import AuthInterceptor, Method, drain
from edgellm.rpc.trust.trust import Right
from edgellm.services.server.listener import Notify, Service, Stream, in_thread, next_message, write_in_time
from edgellm.storage.layer_pieces import IncomingPiece
from edgellm.storage.layer_store import OWN, LayerStore

SILENT_SECONDS = 60.0  # wait for a portion

Measurer = Callable[[Blocks, float, Callable[[str], None]], DeviceFigures]
"""Measures this device with the given layers, unless its last figures are at most that many seconds old; reports its
progress to the callback."""


class LayerService(Service):
    """The calls about layers, for devices with the right to files, and measurements, for those with the right to
    compute. Disk access is in threads; one measurement of the device at a time."""

    contract, working, here = CONTRACT, True, OWN
    over = "An upload or a measurement has ended"

    def __init__(
        self, store: LayerStore, notify: Notify, guard: AuthInterceptor | None = None, measurer: Measurer | None = None
    ) -> None:
        """Without a `measurer` this device cannot be measured."""
        super().__init__(notify, guard)
        self._store, self._measurer = store, measurer
        self._uploads: dict[str, asyncio.Future[None]] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._measuring = asyncio.Lock()

    def right_for(self, call: Method) -> Right:
        return Right.COMPUTE if call in (self.measure, self.flow) else Right.FILES

    async def held(self, data: bytes, stream: Stream) -> pb.HeldReply:
        check_version(parse_message(pb.HeldRequest, data).protocol, "the other device")
        return write_facts(await asyncio.to_thread(self._store.facts, self.owner(stream)))

    async def clean(self, data: bytes, stream: Stream) -> pb.CleanReply:
        request = parse_message(pb.CleanRequest, data)
        check_version(request.protocol, "the other device")
        removed = await asyncio.to_thread(self._store.clean, request.fingerprint.hex() or None, self.owner(stream))
        return pb.CleanReply(**asdict(removed))

    async def put(self, _frames: Any, stream: Stream) -> None:
        """Take pieces, until the same device opens another upload."""
        owner = self.owner(stream)
        if (earlier := self._uploads.get(owner)) is not None:
            earlier.cancel()
        receiving = self._uploads[owner] = asyncio.ensure_future(self._in_turn(stream, owner))
        try:
            return await receiving
        except asyncio.CancelledError:
            if self._uploads.get(owner) is receiving:  # the device has left
                raise
            error: EdgeError = StoreBusy("The same device has opened another upload.", "Wait until that one has ended.")
        except EdgeError as failure:
            error = failure
        finally:
            if self._uploads.get(owner) is receiving:
                del self._uploads[owner]
        refused = pb.Refused(status=error.rpc_status, why=f"{error.what}\n{error.next_step}")
        await write_in_time(stream, pb.PutReply(refused=refused))
        await drain(stream)
        raise error

    async def _in_turn(self, stream: Stream, owner: str) -> None:
        async with self._turns[owner]:
            await self._receive(stream, owner)

    async def _receive(self, stream: Stream, owner: str) -> None:
        first = await _next(stream)
        if first.WhichOneof("frame") != "wanted":
            raise ProtocolError("The first frame is not Wanted.", SAME_VERSION)
        check_version(first.wanted.protocol, "the other device")
        manifest = read_manifest(first.wanted.recipe)
        indices = read_places(first.wanted.pieces, manifest)
        pieces = [manifest.pieces[index] for index in indices]
        with ExitStack() as held:
            reserving = self._store.receiving(manifest, pieces, owner)
            receiving = await in_thread(partial(held.enter_context, reserving))
            arrivals = [
                pb.Arrived(
                    piece=index, size=self._store.arrived(piece, owner),
                    whole=self._store.find(piece) is not None,
                )
                for index, piece in zip(indices, pieces, strict=True)
            ]  # fmt: skip
            await _send(stream, there=pb.There(pieces=arrivals))
            for arrival in arrivals:
                if not arrival.whole:
                    piece = manifest.pieces[arrival.piece]
                    with await in_thread(partial(receiving, piece), partial(_beat, stream)) as incoming:
                        await _fill(stream, arrival.piece, incoming)
        self._notify(f"{len(indices)} pieces of {manifest.name} are complete.")

    async def measure(self, data: bytes, stream: Stream) -> None:
        """Measure this device in a thread, and send heartbeats meanwhile. Send the figures last."""
        request = parse_message(pb.MeasureRequest, data)
        check_version(request.protocol, "the other device")
        if (measurer := self._measurer) is None:
            raise MeasureFailed("This device does not measure itself.", "Start a worker: edgellm serve --role worker")
        blocks, progress = read_blocks(request), ["waiting for another measurement"]

        async def beat() -> None:
            await stream.write(pb.MeasureReply(doing=progress[-1]).SerializeToString())

        async with self._measuring:
            figures = await in_thread(lambda: measurer(blocks, request.oldest, progress.append), beat)
        await stream.write(pb.MeasureReply(figures=write_figures(figures)).SerializeToString())

    async def flow(self, _frames: Any, stream: Stream) -> None:
        received, first, last = 0, 0.0, 0.0
        while isinstance(data := await stream.read(), bytes):
            frame = parse_message(pb.FlowFrame, data)
            if frame.data:
                last = time.perf_counter()
                first = first or last
                received += len(frame.data)
            elif frame.want > MOST_SENT:
                raise ProtocolError(
                    f"A measurement of {frame.want} bytes is too large.", f"Ask for at most {MOST_SENT}."
                )
            elif frame.want:
                for size in frame_sizes(frame.want):
                    await stream.write(pb.FlowFrame(data=bytes(size)).SerializeToString())
            else:
                await stream.write(pb.FlowFrame(come=received, seconds=last - first).SerializeToString())


async def _send(stream: Stream, **reply: Any) -> None:
    await stream.write(pb.PutReply(**reply).SerializeToString())


async def _beat(stream: Stream) -> None:
    await _send(stream, checking=pb.Checking())


async def _fill(stream: Stream, index: int, incoming: IncomingPiece) -> None:
    await _send(stream, arrived=pb.Arrived(piece=index, size=incoming.size))
    while incoming.size < incoming.piece.size:
        frame = await _next(stream)
        portion = frame.portion
        if frame.WhichOneof("frame") != "portion" or portion.piece != index or portion.offset != incoming.size:
            raise ProtocolError(
                f"Expected a portion of piece {index} at {incoming.size}, but received piece {portion.piece} at"
                f" {portion.offset}.", SAME_VERSION
            )  # fmt: skip
        if not 0 < len(portion.data) <= WINDOW:
            raise ProtocolError(f"A portion has {len(portion.data)} bytes; {WINDOW} are allowed.", SAME_VERSION)
        await in_thread(partial(incoming.append, portion.data))
        if incoming.size < incoming.piece.size:
            await _send(stream, arrived=pb.Arrived(piece=index, size=incoming.size))
    await in_thread(incoming.finish, partial(_beat, stream))
    await _send(stream, arrived=pb.Arrived(piece=index, size=incoming.size, whole=True))


async def _next(stream: Stream) -> pb.PutFrame:
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            frame = await next_message(stream, pb.PutFrame)
    except TimeoutError:
        raise DeviceLost(f"No portion has arrived for {SILENT_SECONDS:g} seconds.", "Start the upload again.") from None
    if frame is None:
        raise ProtocolError("The upload ended before every piece was complete.", "Start the upload again.")
    return frame

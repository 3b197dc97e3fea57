"""The server of `layers.proto`: stores layers for other devices, lists them, and measures this device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
import grpc.aio

from edgellm.errors import SAME_VERSION, DeviceLost, EdgeError, ProtocolError, StoreBusy
from edgellm.rpc.layers.codec import (
    MAX_PORTION,
    PROTOCOL,
    SERVICE,
    SILENT_SECONDS,
    in_thread,
    read_manifest,
    read_places,
    refusal,
    with_error_status,
    write_facts,
)
from edgellm.rpc.layers.measuring import Measurer, MeasureService
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method, caller_id
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.rpc.versions import check_version, parse_message
from edgellm.storage.layers.incoming_piece import IncomingPiece
from edgellm.storage.layers.store import OWN, LayerStore

DRAIN_SECONDS = 5.0  # time for which a refused stream is still read


def layer_handlers(
    store: LayerStore,
    guard: AuthInterceptor | None = None,
    notify: Callable[[str], None] | None = None,
    measurer: Measurer | None = None,
    trust: Trust | None = None,
) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handler for `grpc.aio.Server.add_generic_rpc_handlers`. Call this in the loop that runs the server.

    With a `guard`, only paired devices are answered: those with the right to files, and for measurements those with
    the right to compute. Without a `guard`, every caller on this machine is answered. `notify` is called in the loop
    with events and errors, as text. `measurer` runs in a thread; without it the device cannot be measured. With `trust`
    the device also measures its connections to other paired devices.
    """
    notify = notify or (lambda _text: None)
    methods = LayerService(store, guard, notify).methods() | MeasureService(guard, notify, measurer, trust).methods()
    return grpc.method_handlers_generic_handler(SERVICE, methods)


class _Upload:
    """A stream that brings pieces. It ends when the same device opens another."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()


class LayerService:
    """The calls about layers. They run in one event loop, and disk access in threads."""

    def __init__(self, store: LayerStore, guard: AuthInterceptor | None, notify: Callable[[str], None]) -> None:
        self._store, self._guard, self._notify = store, guard, notify
        self._uploads: dict[str, _Upload] = {}

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers by method name. Streams take bytes, which are parsed only behind the guard's check."""

        def guarded(method: Method) -> Any:
            return with_error_status(method, self._guard, Right.FILES, self._notify)

        return {
            "Held": grpc.unary_unary_rpc_method_handler(
                guarded(self.list_layers), pb.HeldRequest.FromString, pb.HeldReply.SerializeToString
            ),
            "Clean": grpc.unary_unary_rpc_method_handler(
                guarded(self.clean), pb.CleanRequest.FromString, pb.CleanReply.SerializeToString
            ),
            "Put": grpc.stream_stream_rpc_method_handler(guarded(self.put), None, pb.PutReply.SerializeToString),
        }

    async def list_layers(self, request: pb.HeldRequest, context: Context) -> pb.HeldReply:
        """Reply with the layers that the caller has uploaded."""
        check_version(request.protocol, PROTOCOL, "the other device")
        return write_facts(await asyncio.to_thread(self._store.facts, self._owner(context)))

    def _owner(self, context: Context) -> str:
        """Return the owner under which the caller's pieces are stored; a caller sees and removes only its own."""
        return OWN if self._guard is None else caller_id(context).digest.hex()

    async def clean(self, request: pb.CleanRequest, context: Context) -> pb.CleanReply:
        """Remove the pieces that the caller has uploaded and that are not in use."""
        check_version(request.protocol, PROTOCOL, "the other device")
        removed = await asyncio.to_thread(self._store.clean, request.fingerprint.hex() or None, self._owner(context))
        return pb.CleanReply(**asdict(removed))

    async def put(self, _frames: Any, stream: Context) -> None:
        """Receive pieces, one after the other."""
        upload = _Upload(self._owner(stream))
        earlier = self._uploads.get(upload.device)
        self._uploads[upload.device] = upload
        try:
            if earlier is not None:
                if not earlier.superseded.done():
                    earlier.superseded.set_result(None)
                await earlier.ended.wait()
            await self._receive(stream, upload)
        except EdgeError as error:
            upload.ended.set()
            await _refuse(stream, error)
            raise
        finally:
            upload.ended.set()
            if self._uploads.get(upload.device) is upload:
                del self._uploads[upload.device]

    async def _receive(self, stream: Context, upload: _Upload) -> None:
        first = await _next(stream, upload)
        if first.WhichOneof("frame") != "wanted":
            raise ProtocolError("The first frame is not Wanted.", SAME_VERSION)
        check_version(first.wanted.protocol, PROTOCOL, "the other device")
        manifest = read_manifest(first.wanted.recipe)
        indices = read_places(first.wanted.pieces, manifest)
        pieces = [manifest.pieces[index] for index in indices]
        with ExitStack() as held:
            reserving = self._store.receiving(manifest, pieces, upload.device)
            receiving = await in_thread(partial(held.enter_context, reserving))
            sizes = [self._store.arrived(piece, upload.device) for piece in pieces]
            is_whole = [self._store.find(piece) is not None for piece in pieces]
            arrivals = [
                pb.Arrived(piece=index, size=size, whole=whole)
                for index, size, whole in zip(indices, sizes, is_whole, strict=True)
            ]
            await stream.write(pb.PutReply(there=pb.There(pieces=arrivals)))
            for index, piece, whole in zip(indices, pieces, is_whole, strict=True):
                if not whole:
                    with await in_thread(partial(receiving, piece), partial(_beat, stream)) as incoming:
                        await self._fill(stream, upload, index, incoming)
        self._notify(f"{len(indices)} pieces of {manifest.name} are complete.")

    async def _fill(self, stream: Context, upload: _Upload, index: int, incoming: IncomingPiece) -> None:
        await stream.write(pb.PutReply(arrived=pb.Arrived(piece=index, size=incoming.size)))
        while incoming.size < incoming.piece.size:
            frame = await _next(stream, upload)
            portion = frame.portion
            if frame.WhichOneof("frame") != "portion" or portion.piece != index or portion.offset != incoming.size:
                raise ProtocolError(
                    f"Expected a portion of piece {index} at {incoming.size}, but received piece {portion.piece} at"
                    f" {portion.offset}.", SAME_VERSION
                )  # fmt: skip
            if not 0 < len(portion.data) <= MAX_PORTION:
                raise ProtocolError(
                    f"A portion has {len(portion.data)} bytes; {MAX_PORTION} are allowed.", SAME_VERSION
                )
            await in_thread(partial(incoming.append, portion.data))
            if incoming.size < incoming.piece.size:
                await stream.write(pb.PutReply(arrived=pb.Arrived(piece=index, size=incoming.size)))
        await in_thread(incoming.finish, partial(_beat, stream))
        await stream.write(pb.PutReply(arrived=pb.Arrived(piece=index, size=incoming.size, whole=True)))


async def _beat(stream: Context) -> None:
    await stream.write(pb.PutReply(checking=pb.Checking()))


async def _refuse(stream: Context, error: EdgeError) -> None:
    """Send the error, and read on for a while: gRPC hides from a peer that still writes how its stream ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            await stream.write(pb.PutReply(refused=refusal(error)))
            while isinstance(await stream.read(), bytes):
                pass


async def _next(stream: Context, upload: _Upload) -> pb.PutFrame:
    """Return the next frame."""
    reading = asyncio.ensure_future(stream.read())
    try:
        done, _ = await asyncio.wait(
            {reading, upload.superseded}, timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if upload.superseded in done:
            raise StoreBusy("The same device has opened another upload.", "Wait until that one has ended.")
        if not done:
            raise DeviceLost(f"No portion has arrived for {SILENT_SECONDS:g} seconds.", "Start the upload again.")
        data = reading.result()
    finally:
        reading.cancel()
    if not isinstance(data, bytes):
        raise ProtocolError("The upload ended before every piece was complete.", "Start the upload again.")
    return parse_message(pb.PutFrame, data)

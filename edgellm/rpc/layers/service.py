"""The device's side of `layers.proto`: it stores layers for others, lists them, and lets itself be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio

from edgellm.errors import DeviceLost, EdgeError, ProtocolError, StoreBusy
from edgellm.rpc.layers.benchmark_service import Measurer, MeasureService, answered
from edgellm.rpc.layers.codec import (
    BEAT_SECONDS,
    PORTION_MOST,
    PROTOCOL,
    SERVICE,
    SILENT_SECONDS,
    read_places,
    read_recipe,
    refusal,
    write_recipe,
)
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method, who
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import check_version, parsed
from edgellm.storage.layers.incoming_piece import Partial
from edgellm.storage.layers.manifest import Recipe
from edgellm.storage.layers.store import OWN, LayerStore

HEARD_OUT_SECONDS = 5.0

P = ParamSpec("P")
T = TypeVar("T")


def layer_handlers(
    store: LayerStore,
    guard: AuthInterceptor | None = None,
    tell: Callable[[str], None] | None = None,
    measurer: Measurer | None = None,
    trust: Trust | None = None,
) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handler for `grpc.aio.Server.add_generic_rpc_handlers`. Call this in the loop that runs the server.

    With a `guard`, only paired devices are answered: those with the right to files, and for measurements those with
    the right to compute. Without a `guard`, every caller on this machine is answered. `tell` is called in the loop with
    news and errors, as text. `measurer` runs in a thread; without it the device cannot be measured. With `trust` the
    device also measures its connections to other paired devices.
    """
    told = tell or (lambda _text: None)
    service = LayerService(store, guard, told)
    measured = MeasureService(guard, told, measurer, trust)
    return grpc.method_handlers_generic_handler(SERVICE, service.methods() | measured.methods())


class _Turn:
    """A stream that brings pieces. It ends when the same device opens another."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.overtaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class LayerService:
    """The calls about layers. Lives in one event loop; disk access runs in threads."""

    def __init__(self, store: LayerStore, guard: AuthInterceptor | None, tell: Callable[[str], None]) -> None:
        self._store, self._guard, self._tell = store, guard, tell
        self._turns: dict[str, _Turn] = {}

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers by method name. Streams take bytes, so nothing is parsed before the guard's check."""

        def guarded(method: Method) -> Any:
            return answered(method, self._guard, Right.FILES, self._tell)

        return {
            "Held": grpc.unary_unary_rpc_method_handler(
                guarded(self.held), pb.HeldRequest.FromString, pb.HeldReply.SerializeToString
            ),
            "Clean": grpc.unary_unary_rpc_method_handler(
                guarded(self.clean), pb.CleanRequest.FromString, pb.CleanReply.SerializeToString
            ),
            "Put": grpc.stream_stream_rpc_method_handler(guarded(self.put), None, pb.PutReply.SerializeToString),
        }

    async def held(self, request: pb.HeldRequest, context: Context) -> pb.HeldReply:
        """Reply with the layers that the caller brought."""
        check_version(request.protocol, PROTOCOL, "the other device")
        return await asyncio.to_thread(self._held, self._owner(context))

    def _owner(self, context: Context) -> str:
        """Return the owner under which the caller's pieces are stored; a caller sees and removes only its own."""
        return OWN if self._guard is None else who(context).digest.hex()

    def _held(self, owner: str) -> pb.HeldReply:
        reply = pb.HeldReply(protocol=PROTOCOL, limit=self._store.limit, size=self._store.size, free=self._store.free())
        for model in self._store.models(owner):
            whole = set(model.pieces)
            reply.models.add(
                recipe=write_recipe(model.recipe),
                pieces=[place for place, piece in enumerate(model.recipe.pieces) if piece in whole],
                arriving=sum(model.arriving.values()),
                used=int(model.used),
            )
        return reply

    async def clean(self, request: pb.CleanRequest, context: Context) -> pb.CleanReply:
        """Remove the pieces that the caller brought and that are not in use."""
        check_version(request.protocol, PROTOCOL, "the other device")
        gone = await asyncio.to_thread(self._store.clean, request.fingerprint.hex() or None, self._owner(context))
        return pb.CleanReply(pieces=gone.pieces, size=gone.size, in_use=gone.in_use)

    async def put(self, _frames: Any, stream: Context) -> None:
        """Receive pieces, one after the other."""
        turn = _Turn(self._owner(stream))
        before = self._turns.get(turn.device)
        self._turns[turn.device] = turn
        try:
            if before is not None:
                if not before.overtaken.done():
                    before.overtaken.set_result(None)
                await before.over.wait()
            await self._take(stream, turn)
        except EdgeError as error:
            turn.over.set()
            await _refuse(stream, error)
            raise
        finally:
            turn.over.set()
            if self._turns.get(turn.device) is turn:
                del self._turns[turn.device]

    async def _take(self, stream: Context, turn: _Turn) -> None:
        first = await _next(stream, turn)
        if first.WhichOneof("frame") != "wanted":
            raise ProtocolError("The first frame is not Wanted.", _UPDATE)
        check_version(first.wanted.protocol, PROTOCOL, "the other device")
        recipe = read_recipe(first.wanted.recipe)
        places = read_places(first.wanted.pieces, recipe)
        pieces = [recipe.pieces[place] for place in places]
        with ExitStack() as held:
            receiving = await _apart(held.enter_context, self._store.receiving(recipe, pieces, turn.device))
            there = [self._arrived(recipe, place, turn.device) for place in places]
            await stream.write(pb.PutReply(there=pb.There(pieces=there)))
            for place, told in zip(places, there, strict=True):
                if not told.whole:
                    with ExitStack() as opened:
                        piece = receiving.piece(recipe.pieces[place])
                        partial = await _alive(stream, _apart(opened.enter_context, piece))
                        await self._fill(stream, turn, place, partial)
        self._tell(f"{len(places)} pieces of {recipe.name} are here.")

    def _arrived(self, recipe: Recipe, place: int, owner: str) -> pb.Arrived:
        piece = recipe.pieces[place]
        return pb.Arrived(
            piece=place, size=self._store.arrived(piece, owner), whole=self._store.find(piece) is not None
        )

    async def _fill(self, stream: Context, turn: _Turn, place: int, partial: Partial) -> None:
        """Receive portions of one piece, each starting where the last one ended, until the piece is whole."""
        await stream.write(pb.PutReply(arrived=pb.Arrived(piece=place, size=partial.size)))
        while partial.size < partial.piece.size:
            frame = await _next(stream, turn)
            portion = frame.portion
            if frame.WhichOneof("frame") != "portion" or portion.piece != place or portion.offset != partial.size:
                raise ProtocolError(
                    f"A portion of piece {portion.piece} at {portion.offset} comes where {place} at {partial.size} is"
                    " due.", _UPDATE
                )  # fmt: skip
            if not 0 < len(portion.data) <= PORTION_MOST:
                raise ProtocolError(f"A portion has {len(portion.data)} bytes.", _UPDATE)
            await _apart(partial.append, portion.data)
            if partial.size < partial.piece.size:
                await stream.write(pb.PutReply(arrived=pb.Arrived(piece=place, size=partial.size)))
        await _alive(stream, _apart(partial.finish))
        await stream.write(pb.PutReply(arrived=pb.Arrived(piece=place, size=partial.size, whole=True)))


async def _refuse(stream: Context, error: EdgeError) -> None:
    """Send the error, then read on for a while: gRPC hides how a stream ended from a peer that still writes to it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARD_OUT_SECONDS):
            await stream.write(pb.PutReply(refused=refusal(error)))
            while isinstance(await stream.read(), bytes):
                pass


async def _next(stream: Context, turn: _Turn) -> pb.PutFrame:
    """Return the next frame.

    Raises:
        StoreBusy: the device has begun again on another stream.
        DeviceLost: nothing comes within SILENT_SECONDS.
        ProtocolError: the data is not a frame, or the stream ends too soon.
    """
    reading = asyncio.ensure_future(stream.read())
    try:
        done, _ = await asyncio.wait(
            {reading, turn.overtaken}, timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if turn.overtaken in done:
            raise StoreBusy("The same device has begun again on another stream.", "Go on there.")
        if not done:
            raise DeviceLost(f"No portion has come for {SILENT_SECONDS:g} seconds.", "Begin again.")
        data = reading.result()
    finally:
        reading.cancel()
    if not isinstance(data, bytes):
        raise ProtocolError("The stream ends before every piece is whole.", "Begin again.")
    return parsed(pb.PutFrame, data)


async def _apart(work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Run slow work in a thread. If the call is cancelled meanwhile, still wait for the work, so that no file is closed
    under it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            await asyncio.wait({task})


async def _alive(stream: Context, work: Awaitable[T]) -> T:
    """Wait for `work`, and meanwhile send a sign of life every second."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=BEAT_SECONDS))[0]:
            await stream.write(pb.PutReply(checking=pb.Checking()))
        return task.result()
    finally:
        if not task.done():
            await asyncio.wait({task})


_UPDATE = "Run the same version of edgellm on both sides."

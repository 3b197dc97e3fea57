"""The device's side of `layers.proto`: it takes layers into its store, tells of them, and has itself measured."""

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
from edgellm.rpc.proto_parse import parsed
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method, who
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import check_version
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
    """For `grpc.aio.Server.add_generic_rpc_handlers`. To be made in the loop that runs the server.

    With a `guard`, paired devices alone are answered, and of them those with the right to files; those with the right
    to compute may have the device measured. Without one, whoever is on this machine. `tell` hears what is taken, in
    the loop. `measurer` runs in a thread; without one the device cannot be measured. With `trust` it measures its lines
    to other paired devices, too.
    """
    told = tell or (lambda _text: None)
    service = LayerService(store, guard, told)
    measured = MeasureService(guard, told, measurer, trust)
    return grpc.method_handlers_generic_handler(SERVICE, service.methods() | measured.methods())


class _Turn:
    """A stream that brings pieces. It ends when the same device begins another."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.overtaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class LayerService:
    """The calls about layers. Lives in one event loop; what touches the disk runs in threads."""

    def __init__(self, store: LayerStore, guard: AuthInterceptor | None, tell: Callable[[str], None]) -> None:
        self._store, self._guard, self._tell = store, guard, tell
        self._turns: dict[str, _Turn] = {}

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Streams deal in bytes, so that nothing is parsed unasked."""

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
        """What the caller brought."""
        check_version(request.protocol, PROTOCOL, "the other device")
        return await asyncio.to_thread(self._held, self._owner(context))

    def _owner(self, context: Context) -> str:
        """Whose pieces the caller sees, brings and removes: its own."""
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
        """Removes what the caller brought and nobody uses."""
        check_version(request.protocol, PROTOCOL, "the other device")
        gone = await asyncio.to_thread(self._store.clean, request.fingerprint.hex() or None, self._owner(context))
        return pb.CleanReply(pieces=gone.pieces, size=gone.size, in_use=gone.in_use)

    async def put(self, _frames: Any, stream: Context) -> None:
        """Takes pieces, one behind the other."""
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
        """Takes portions of one piece, each where the last has ended, until it is whole."""
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
    """Says why, and hears the sender out: who writes to a stream that has ended is not told by gRPC how it ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(HEARD_OUT_SECONDS):
            await stream.write(pb.PutReply(refused=refusal(error)))
            while isinstance(await stream.read(), bytes):
                pass


async def _next(stream: Context, turn: _Turn) -> pb.PutFrame:
    """The next frame.

    Raises:
        StoreBusy: the device has begun again on another stream.
        DeviceLost: nothing comes.
        ProtocolError: it is no frame, or the stream ends too soon.
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
    """Runs in a thread what may take its time. If the caller is gone meanwhile, it is waited for all the same, so that
    nobody closes a file under it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **more))
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            await asyncio.wait({task})


async def _alive(stream: Context, work: Awaitable[T]) -> T:
    """Says every second that something is done."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=BEAT_SECONDS))[0]:
            await stream.write(pb.PutReply(checking=pb.Checking()))
        return task.result()
    finally:
        if not task.done():
            await asyncio.wait({task})


_UPDATE = "Run the same version of edgellm on both sides."

"""The sender's side of bringing layers to a device, with a bounded number of unacknowledged bytes in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.errors import DeviceLost, EdgeError, LayersCorrupt, LayersRefused, ProtocolError
from edgellm.rpc.layers.codec import (
    FRAME,
    PATIENCE_SECONDS,
    PROTOCOL,
    WINDOW,
    method,
    read_recipe,
    refused,
    told,
    write_recipe,
)
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.versions import check_version
from edgellm.storage.layers.manifest import LayerPiece, Recipe

Cut = Callable[[LayerPiece], Iterator[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """A model's layers on a device: its whole pieces, by their place in the recipe, and bytes of incomplete pieces."""

    recipe: Recipe
    pieces: tuple[int, ...]
    arriving: int
    used: float


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A device's store: its limit and its size in bytes, the free bytes of its disk, and the layers by model."""

    limit: int
    size: int
    free: int
    models: tuple[HeldLayers, ...]


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """Progress in bytes: `arrived` of the `total` wanted are there; `sent` were sent by this call."""

    arrived: int
    total: int
    sent: int


class RateLimiter:
    """A limit of `rate` bytes a second over all connections that share it; 0 for no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._rate, self._free = rate, 0.0

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        if self._rate:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._rate
            await asyncio.sleep(self._free - size / self._rate - now)


async def held(channel: grpc.aio.Channel, who: str, seconds: float = PATIENCE_SECONDS) -> StoreFacts:
    """Ask what the device keeps.

    Raises:
        NotPermitted: the device refuses to say.
        ProtocolError: the device keeps no layers, or speaks another version.
        DeviceLost: the device is gone.
    """
    call = channel.unary_unary(method("Held"), pb.HeldRequest.SerializeToString, pb.HeldReply.FromString)
    try:
        reply: pb.HeldReply = await call(pb.HeldRequest(protocol=PROTOCOL), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise told(error.code(), error.details(), who) from None
    check_version(reply.protocol, PROTOCOL, who)
    models = []
    for one in reply.models:
        with suppress(LayersRefused):  # perhaps of another version: treat it as missing
            recipe = read_recipe(one.recipe)
            places = tuple(place for place in one.pieces if place < len(recipe.pieces))
            models.append(HeldLayers(recipe, places, one.arriving, float(one.used)))
    return StoreFacts(reply.limit, reply.size, reply.free, tuple(models))


async def clean(channel: grpc.aio.Channel, who: str, fingerprint: str = "") -> tuple[int, int, int]:
    """Have the device remove what is not in use, of the model with this `fingerprint` or of all; return the removed
    pieces and bytes, and the pieces that stayed. Raises as `held`, and LayersMissing if the model is not there."""
    call = channel.unary_unary(method("Clean"), pb.CleanRequest.SerializeToString, pb.CleanReply.FromString)
    asked = pb.CleanRequest(protocol=PROTOCOL, fingerprint=bytes.fromhex(fingerprint))
    try:
        reply: pb.CleanReply = await call(asked, timeout=PATIENCE_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise told(error.code(), error.details(), who) from None
    return reply.pieces, reply.size, reply.in_use


async def put(
    channel: grpc.aio.Channel,
    who: str,
    recipe: Recipe,
    wanted: Sequence[int],
    cut: Cut,
    pace: RateLimiter,
    tell: Callable[[UploadProgress], None],
) -> UploadProgress:
    """Send the pieces `wanted`, by their place in the recipe, to a device, as far as they are not there yet.

    `cut` yields the bytes of a piece, in a thread. `tell` is called with the progress, in the loop.

    Raises:
        DeviceLost: the connection is lost, or stalls; the device keeps what it has acknowledged.
        NotPermitted, ProtocolError, LayersRefused and its kinds: the device refuses the pieces, and says why.
        LayersCorrupt: also if the model's file no longer matches the recipe.
    """
    line: Any = channel.stream_stream(method("Put"), pb.PutFrame.SerializeToString, pb.PutReply.FromString)
    call = line()
    words = _Words(call, who)
    try:
        return await _Sender(words, recipe, sorted(wanted), cut, pace, tell).run()
    except TimeoutError:
        raise DeviceLost(f"{who} gives no sign of life.", "What has arrived there is kept: try again.") from None
    finally:
        words.listening.cancel()
        call.cancel()


class _Words:
    """Both directions of a stream. It is read all the time: to a side that writes to a stream which its peer has ended,
    gRPC reports no reason."""

    def __init__(self, call: Any, who: str) -> None:
        self._call, self._who = call, who
        self._heard: asyncio.Queue[pb.PutReply | EdgeError | None] = asyncio.Queue()
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while isinstance(reply := await self._call.read(), pb.PutReply):
                self._heard.put_nowait(reply)
                if reply.WhichOneof("reply") == "refused":
                    return
            self._heard.put_nowait(None)
        except grpc.aio.AioRpcError as error:
            self._heard.put_nowait(told(error.code(), error.details(), self._who))

    @property
    def news(self) -> bool:
        """Whether a reply waits to be heard."""
        return not self._heard.empty()

    async def say(self, frame: pb.PutFrame) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while await self.hear() is not None:  # raises the device's reason, if it gave one
                pass
            raise DeviceLost(f"{self._who} has ended the line.", "Try again.") from None

    async def hear(self) -> pb.PutReply | None:
        """Return the next reply that is more than a sign of life; None at the end. Raises the device's error."""
        while True:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reply = await self._heard.get()
            if isinstance(reply, EdgeError):
                raise reply
            kind = None if reply is None else reply.WhichOneof("reply")
            if reply is not None and kind == "refused":
                raise refused(reply.refused, self._who)
            if kind != "checking":
                return reply


class _Sender:
    def __init__(
        self,
        words: _Words,
        recipe: Recipe,
        wanted: list[int],
        cut: Cut,
        pace: RateLimiter,
        tell: Callable[[UploadProgress], None],
    ) -> None:
        self._words, self._recipe, self._wanted = words, recipe, wanted
        self._cut, self._pace, self._tell = cut, pace, tell
        self._there: dict[int, int] = {}  # acknowledged bytes of each piece
        self._sent = 0

    async def run(self) -> UploadProgress:
        asked = pb.Wanted(protocol=PROTOCOL, recipe=write_recipe(self._recipe), pieces=self._wanted)
        await self._words.say(pb.PutFrame(wanted=asked))
        first = await self._words.hear()
        if first is None or first.WhichOneof("reply") != "there":
            raise ProtocolError("The device does not say what it has.", _UPDATE)
        whole = set()
        for one in first.there.pieces:
            self._there[one.piece] = one.size
            whole |= {one.piece} if one.whole else set()
        self._tell(self._carried())
        for place in self._wanted:
            if place not in whole:
                await self._piece(place)
        while await self._words.hear() is not None:
            pass
        return self._carried()

    async def _piece(self, place: int) -> None:
        """Send a piece from where the device's copy ends, until the device confirms that its hash is right."""
        piece, arrived = self._recipe.pieces[place], await self._arrived(place)
        offset = arrived.size
        blocks = _blocks(self._cut(piece), offset)
        while not arrived.whole:
            if offset < piece.size and offset - arrived.size + FRAME <= WINDOW and not self._words.news:
                block = await asyncio.to_thread(next, blocks, b"")
                if not block or offset + len(block) > piece.size:
                    raise LayersCorrupt(f"{str(piece).capitalize()} is no longer what it was.", _CHANGED)
                await self._pace.take(len(block))
                await self._words.say(pb.PutFrame(portion=pb.Portion(piece=place, offset=offset, data=block)))
                offset += len(block)
                self._sent += len(block)
                self._tell(self._carried())
            else:
                arrived = await self._arrived(place)

    async def _arrived(self, place: int) -> pb.Arrived:
        reply = await self._words.hear()
        if reply is None or reply.WhichOneof("reply") != "arrived" or reply.arrived.piece != place:
            raise ProtocolError("The device acknowledges what was not sent.", _UPDATE)
        self._there[place] = reply.arrived.size
        self._tell(self._carried())
        return reply.arrived

    def _carried(self) -> UploadProgress:
        total = sum(self._recipe.pieces[place].size for place in self._wanted)
        return UploadProgress(sum(self._there.values()), total, self._sent)


def _blocks(portions: Iterator[bytes | memoryview], skip: int) -> Iterator[bytes]:
    """Yield what follows the first `skip` bytes, in blocks of FRAME bytes; the last block may be shorter."""
    room = bytearray()
    for portion in portions:
        passed = min(skip, len(portion))
        skip -= passed
        room += portion[passed:]
        while len(room) >= FRAME:
            yield bytes(room[:FRAME])
            del room[:FRAME]
    if room:
        yield bytes(room)


_UPDATE = "Run the same version of edgellm on both sides."
_CHANGED = "The model's file has changed: deploy it again."

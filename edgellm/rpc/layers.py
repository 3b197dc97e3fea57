"""`layers.proto`: its messages, the devices that keep layers, and the upload of layers to one of them, with a bounded
number of unacknowledged bytes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from edgellm.errors import (
    SAME_VERSION,
    DeviceLost,
    EdgeError,
    LayersCorrupt,
    LayersMissing,
    LayersRefused,
    MeasureFailed,
    NotPaired,
    NotPermitted,
    ProtocolError,
    StoreBusy,
    StoreFull,
)
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import RETRY_FACTOR
from edgellm.rpc.discovery.peer_probe import ask_peers
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.handshake import PeerInfo, connect_authenticated, dial
from edgellm.rpc.trust.trust import Peer, Right, Rights, Trust
from edgellm.storage.layer_pieces import MAX_PIECES, LayerPiece, Manifest
from edgellm.storage.layer_store import CleanResult, HeldModel, StoreFacts

M = TypeVar("M", bound=Message)

WINDOW = 2**20  # most unacknowledged bytes in flight, and of a portion
FRAME = 2**18  # bytes of a portion that this side sends
REPLY_SECONDS = 30.0  # the sender's wait for a reply or a heartbeat

CONTRACT = pb.DESCRIPTOR.services_by_name["Layers"]
_ERRORS: dict[str, type[EdgeError]] = {
    kind.rpc_status: kind for kind in (LayersRefused, LayersCorrupt, StoreFull, StoreBusy, LayersMissing, MeasureFailed)
} | {"FAILED_PRECONDITION": ProtocolError}
"""Errors by the statuses with which the other side ends a call; with any other one the device is lost."""


def method(name: str) -> str:
    """Return the gRPC path of one of the service's methods."""
    return f"/{CONTRACT.full_name}/{name}"


async def ask(channel: grpc.aio.Channel, call: str, name: str, request: Message, reply: type[M], seconds: float) -> M:
    """Return the reply of the device `name` to a `call` with one answer. Raise the device's error, or DeviceLost."""
    with call_errors(name):
        return parse_message(
            reply, await channel.unary_unary(method(call), None, bytes)(request.SerializeToString(), timeout=seconds)
        )


def write_pieces(pieces: Iterable[LayerPiece]) -> list[pb.Piece]:
    return [pb.Piece(first=one.first, last=one.last, size=one.size, sha256=bytes.fromhex(one.sha256)) for one in pieces]


def read_pieces(messages: Sequence[pb.Piece]) -> tuple[LayerPiece, ...]:
    """Return the pieces in these messages. Raise LayersRefused for values that cannot be valid."""
    if len(messages) > MAX_PIECES:
        raise LayersRefused(f"A model has {len(messages)} pieces; {MAX_PIECES} are allowed.", SAME_VERSION)
    return tuple(LayerPiece(one.first, one.last, one.size, one.sha256.hex()) for one in messages)


def write_manifest(manifest: Manifest) -> pb.Recipe:
    return pb.Recipe(
        fingerprint=bytes.fromhex(manifest.fingerprint), name=manifest.name, architecture=manifest.architecture,
        layers=manifest.layers, pieces=write_pieces(manifest.pieces),
    )  # fmt: skip


def read_manifest(message: pb.Recipe) -> Manifest:
    """Return the manifest in a message. Raise LayersRefused for values that cannot be valid."""
    pieces = read_pieces(message.pieces)
    return Manifest(message.fingerprint.hex(), message.name, message.architecture, message.layers, pieces)


def write_facts(facts: StoreFacts) -> pb.HeldReply:
    reply = pb.HeldReply(protocol=PROTOCOL, limit=facts.limit, size=facts.size, free=facts.free)
    for model in facts.models:
        pieces = [model.manifest.pieces.index(piece) for piece in model.pieces]
        recipe = write_manifest(model.manifest)
        reply.models.add(recipe=recipe, pieces=pieces, arriving=model.arriving, used=int(model.used))
    return reply


def read_facts(message: pb.HeldReply) -> StoreFacts:
    """Return the facts in a message. Models with values that cannot be valid, as of another version, count as
    missing."""
    models = []
    for model in message.models:
        with suppress(LayersRefused):
            manifest = read_manifest(model.recipe)
            pieces = tuple(manifest.pieces[index] for index in model.pieces if index < len(manifest.pieces))
            models.append(HeldModel(manifest, pieces, model.arriving, float(model.used)))
    return StoreFacts(message.limit, message.size, message.free, tuple(models))


def read_places(indices: Sequence[int], manifest: Manifest) -> list[int]:
    """Return the indices of the wanted pieces in a manifest. Raise ProtocolError where they are none, or disordered."""
    found = list(indices)
    if not found or found != sorted(set(found)) or found[-1] >= len(manifest.pieces):
        raise ProtocolError(f"The list of wanted pieces is invalid: {found[:20]}.", SAME_VERSION)
    return found


@contextmanager
def call_errors(name: str) -> Iterator[None]:
    """Raise the status of a failed call to `name` as an error of ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error.code().name, error.details() or "", name) from None


def error_from_status(status: str, text: str, name: str) -> EdgeError:
    """Return the error that the other side, `name`, gave as the status of a call, or DeviceLost."""
    what, _, step = text.partition("\n")
    if status == "UNIMPLEMENTED":
        return ProtocolError(f"{name} does not store layers.", "Start a worker there: edgellm serve --role worker")
    if status == "PERMISSION_DENIED":
        return NotPermitted(f"{name} refuses: {what}", step or "Ask the device's owner for the right.")
    if kind := _ERRORS.get(status):
        return kind(f"{name}: {what}", step or "Check the messages on that device.")
    return DeviceLost(
        f"The connection to {name} was lost ({status.lower()}: {what}).", "Try again; what has arrived there is kept."
    )


Cut = Callable[[LayerPiece], Iterator[bytes | memoryview]]


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
        if self._rate:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._rate
            await asyncio.sleep(self._free - size / self._rate - now)


async def list_layers(channel: grpc.aio.Channel, name: str, seconds: float = REPLY_SECONDS) -> StoreFacts:
    """Return the layers that this device has uploaded to another one, and the limits of that device's store."""
    reply = await ask(channel, "Held", name, pb.HeldRequest(protocol=PROTOCOL), pb.HeldReply, seconds)
    check_version(reply.protocol, name)
    return read_facts(reply)


async def clean(channel: grpc.aio.Channel, name: str, fingerprint: str = "") -> CleanResult:
    """Remove pieces that are not in use from a device, of the model with this `fingerprint` or of all."""
    request = pb.CleanRequest(protocol=PROTOCOL, fingerprint=bytes.fromhex(fingerprint))
    reply = await ask(channel, "Clean", name, request, pb.CleanReply, REPLY_SECONDS)
    return CleanResult(reply.pieces, reply.size, reply.in_use)


async def upload(
    channel: grpc.aio.Channel,
    name: str,
    manifest: Manifest,
    wanted: Sequence[int],
    cut: Cut,
    limiter: RateLimiter,
    notify: Callable[[UploadProgress], None],
) -> UploadProgress:
    """Send a device the `wanted` pieces that it lacks; return the final progress. Pieces are given by index. `cut`
    yields the bytes of a piece, in a thread. `notify` is called with the progress, in the loop."""
    start: Any = channel.stream_stream(method("Put"), pb.PutFrame.SerializeToString, pb.PutReply.FromString)
    stream = _UploadStream(start(), name)
    acknowledged: dict[int, int] = {}  # bytes of each piece
    total, sent = sum(manifest.pieces[index].size for index in wanted), 0

    async def arrived(index: int) -> pb.Arrived:
        reply = await stream.receive()
        if reply is None or reply.WhichOneof("reply") != "arrived" or reply.arrived.piece != index:
            raise ProtocolError("The device acknowledged a piece that was not sent.", SAME_VERSION)
        acknowledged[index] = reply.arrived.size
        notify(UploadProgress(sum(acknowledged.values()), total, sent))
        return reply.arrived

    try:
        request = pb.Wanted(protocol=PROTOCOL, recipe=write_manifest(manifest), pieces=sorted(wanted))
        await stream.send(pb.PutFrame(wanted=request))
        first = await stream.receive()
        if first is None or first.WhichOneof("reply") != "there":
            raise ProtocolError("The device has not sent the list of pieces that it has.", SAME_VERSION)
        acknowledged |= {one.piece: one.size for one in first.there.pieces}
        whole = {one.piece for one in first.there.pieces if one.whole}
        notify(UploadProgress(sum(acknowledged.values()), total, sent))
        for index in sorted(set(wanted) - whole):
            piece, state = manifest.pieces[index], await arrived(index)
            offset = state.size
            blocks = _blocks(cut(piece), offset)
            while not state.whole:  # the device confirms that the hash is right
                if offset == piece.size or offset - state.size + FRAME > WINDOW or stream.has_reply:
                    state = await arrived(index)
                    continue
                block = await asyncio.to_thread(next, blocks, b"")
                if not block or offset + len(block) > piece.size:
                    raise LayersCorrupt(f"{str(piece).capitalize()} has changed on this device.", _CHANGED)
                await limiter.take(len(block))
                portion = pb.Portion(piece=index, offset=offset, data=block)
                offset, sent = offset + len(block), sent + len(block)
                await stream.send(pb.PutFrame(portion=portion))
        while await stream.receive() is not None:
            pass
        return UploadProgress(sum(acknowledged.values()), total, sent)
    except TimeoutError:
        raise DeviceLost(f"{name} has stopped responding.", "Try again; what has arrived there is kept.") from None
    finally:
        if acknowledged:  # what was sent last counts, though it was not acknowledged
            notify(UploadProgress(sum(acknowledged.values()), total, sent))
        stream.close()


class _UploadStream:
    """Both directions of a stream. It is read continuously, because gRPC reports no reason when a write fails on a
    stream that the peer has ended."""

    def __init__(self, call: Any, name: str) -> None:
        self._call, self._name = call, name
        self._replies: asyncio.Queue[pb.PutReply | EdgeError | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read_replies())

    async def _read_replies(self) -> None:
        try:
            with call_errors(self._name):
                while isinstance(reply := await self._call.read(), pb.PutReply):
                    if reply.WhichOneof("reply") == "refused":
                        raise error_from_status(reply.refused.status, reply.refused.why, self._name)
                    self._replies.put_nowait(reply)
            self._replies.put_nowait(None)
        except EdgeError as error:
            self._replies.put_nowait(error)

    @property
    def has_reply(self) -> bool:
        return not self._replies.empty()

    async def send(self, frame: pb.PutFrame) -> None:
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while await self.receive() is not None:  # raises the device's reason, if it gave one
                pass
            raise DeviceLost(f"{self._name} has closed the connection.", "Try again.") from None

    async def receive(self) -> pb.PutReply | None:
        """Return the next reply that is not a heartbeat; None at the end. Raise the device's error."""
        while True:
            async with asyncio.timeout(REPLY_SECONDS):
                reply = await self._replies.get()
            if isinstance(reply, EdgeError):
                raise reply
            if reply is None or reply.WhichOneof("reply") != "checking":
                return reply

    def close(self) -> None:
        self._reader.cancel()
        self._call.cancel()


def _blocks(portions: Iterator[bytes | memoryview], skip: int) -> Iterator[bytes]:
    buffer = bytearray()
    for portion in portions:
        passed = min(skip, len(portion))
        skip -= passed
        buffer += portion[passed:]
        while len(buffer) >= FRAME:
            yield bytes(buffer[:FRAME])
            del buffer[:FRAME]
    if buffer:
        yield bytes(buffer)


_CHANGED = "Deploy the model again: its file has changed."


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: its address, its layers, and the rights of this device there. `peer` is None for a
    worker on this machine that answers in plain text. `error` is the reason why the worker cannot be used; then
    `address` and `facts` are None."""

    name: str
    peer: Peer | None
    address: Address | None = None
    facts: StoreFacts | None = None
    rights: Rights = frozenset()
    round_trip: float = 0.0
    version: str = ""
    error: EdgeError | None = None


def find_workers(trust: Trust, peers: Sequence[Peer], hosts: Sequence[str]) -> list[Worker]:
    """Return each of `peers` as a worker, as `ask_peers` finds them. Errors of a device are returned, not raised."""

    async def read(peer: Peer, address: Address) -> Worker:
        channel, info = await connect_authenticated(address, trust, peer.id)
        async with channel:
            return await _read_worker(channel, peer.name, address, info)

    return [
        Worker(peer.name, peer, error=answer) if isinstance(answer, EdgeError) else answer
        for peer, answer in zip(peers, ask_peers(peers, read, hosts, every_hint=True), strict=True)
    ]


async def reach_worker(trust: Trust | None, worker: Worker) -> grpc.aio.Channel:
    """Return an open channel to a worker; the caller closes it."""
    if worker.address is None:
        raise worker.error or NotPaired(f"No address of {worker.name} is known.", "Check that it is on and serves.")
    if worker.peer is None:
        return await dial(worker.address, None)
    return await dial(worker.address, trust, worker.peer.id)


async def local_worker(address: Address) -> Worker:
    async with open_channel(address) as channel:
        return Worker(str(address), None, address, await list_layers(channel, str(address)), frozenset(Right))


def worker_at_address(trust: Trust, name: str, address: Address) -> Worker:
    """Return the worker at an address: a paired device, by default under its name in the list of peers; or, at a
    loopback address where no paired device was met, a worker in plain text. Errors of a device are returned, not
    raised."""
    paired = not address.loopback or any(address in peer.addresses for peer in trust.peers.all())

    async def probe() -> Worker:
        if not paired:
            return replace(await local_worker(address), name=name or str(address))
        channel, info = await connect_authenticated(address, trust)
        async with channel:
            return await _read_worker(channel, name or info.peer.name, address, info)

    try:
        return run_in_network_loop(probe()).result()
    except EdgeError as error:
        return Worker(name or str(address), None, error=error)


async def _read_worker(channel: grpc.aio.Channel, name: str, address: Address, info: PeerInfo) -> Worker:
    # the device has just answered, so a late reply means that it is busy
    facts = await list_layers(channel, name, RETRY_FACTOR * HELLO_SECONDS)
    return Worker(name, info.peer, address, facts, info.rights, info.seconds, info.version)

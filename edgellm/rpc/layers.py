"""`layers.proto`: its messages, the devices that keep layers, and the upload of layers to one of them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

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
from edgellm.rpc.channel import HELLO_SECONDS, run_in_network_loop
from edgellm.rpc.discovery.peer_probe import ask_peers
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.handshake import check_open
from edgellm.rpc.trust.trust import Peer, Right, Rights, Trust
from edgellm.storage.layer_pieces import MAX_PIECES, LayerPiece, Manifest
from edgellm.storage.layer_store import CleanResult, HeldModel, StoreFacts

M = TypeVar("M", bound=Message)

PORTION = 2**20  # bytes of a piece that are sent at once; with a connection, two such portions are lost at most
REPLY_SECONDS = 60.0  # limit for a reply, before which a device may write a whole piece to a slow disk

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
    try:
        answer = await channel.unary_unary(method(call), None, bytes)(request.SerializeToString(), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise _refusal(error.code().name, error.details() or "", name) from None
    return parse_message(reply, answer)


def _refusal(status: str, text: str, name: str) -> EdgeError:
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


def write_pieces(pieces: Iterable[LayerPiece]) -> list[pb.Piece]:
    return [_write_piece(one) for one in pieces]


def _write_piece(piece: LayerPiece) -> pb.Piece:
    return pb.Piece(first=piece.first, last=piece.last, size=piece.size, sha256=bytes.fromhex(piece.sha256))


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


Cut = Callable[[LayerPiece], Iterator[bytes | memoryview]]


OnUpload = Callable[[int, int], None]
"""Called with the bytes of an upload that have arrived at the device, and with those that this call has sent."""


class RateLimiter:
    """A limit of `rate` bytes a second over all connections that share it; 0 for no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._rate, self._free = rate, 0.0

    async def take(self, size: int) -> None:
        if self._rate:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._rate
            await asyncio.sleep(self._free - size / self._rate - now)


async def list_layers(channel: grpc.aio.Channel, name: str) -> StoreFacts:
    """Return the layers that this device has uploaded to another one, and the limits of that device's store."""
    reply = await ask(channel, "Held", name, pb.HeldRequest(protocol=PROTOCOL), pb.HeldReply, HELLO_SECONDS)
    check_version(reply.protocol, name)
    return read_facts(reply)


async def clean(channel: grpc.aio.Channel, name: str, fingerprint: str = "") -> CleanResult:
    """Remove pieces that are not in use from a device, of the model with this `fingerprint` or of all."""
    request = pb.CleanRequest(protocol=PROTOCOL, fingerprint=bytes.fromhex(fingerprint))
    reply = await ask(channel, "Clean", name, request, pb.CleanReply, REPLY_SECONDS)
    return CleanResult(reply.pieces, reply.size, reply.in_use)


async def upload(
    channel: grpc.aio.Channel, name: str, manifest: Manifest, cut: Cut, limiter: RateLimiter, notify: OnUpload
) -> None:
    """Send a device those pieces of a manifest that it lacks. `cut` yields the bytes of a piece, in a thread. `notify`
    is called with the progress, in the loop."""
    sent, request = 0, pb.Wanted(protocol=PROTOCOL, recipe=write_manifest(manifest))
    arrived = list((await ask(channel, "Reserve", name, request, pb.There, REPLY_SECONDS)).sizes)
    if len(arrived) != len(manifest.pieces):
        raise ProtocolError("The device has not said what it has of each piece.", SAME_VERSION)
    notify(sum(arrived), sent)
    left = enumerate(manifest.pieces)

    async def send() -> None:
        nonlocal sent
        for number, piece in left:
            offset, blocks = -1, iter(list[bytes]())
            while arrived[number] < piece.size:
                if arrived[number] != offset:  # at first, or another program of this device sends the same piece
                    offset = arrived[number]
                    blocks = _blocks(cut(piece), offset)
                block = await asyncio.to_thread(next, blocks, b"")
                if not block or offset + len(block) > piece.size:
                    raise LayersCorrupt(
                        f"{str(piece).capitalize()} has changed on this device.",
                        "Deploy the model again: its file has changed.",
                    )
                await limiter.take(len(block))
                portion = pb.Portion(piece=_write_piece(piece), offset=offset, data=block)
                offset, sent = offset + len(block), sent + len(block)
                try:
                    arrived[number] = (await ask(channel, "Put", name, portion, pb.Arrived, REPLY_SECONDS)).size
                finally:  # what was sent counts, though it may not be acknowledged
                    notify(sum(arrived), sent)

    senders = [
        asyncio.ensure_future(send()) for _ in range(2)
    ]  # one piece is on the way while another is written there
    try:
        await asyncio.gather(*senders)
    finally:
        for one in senders:
            one.cancel()
        await asyncio.gather(*senders, return_exceptions=True)


def _blocks(portions: Iterator[bytes | memoryview], skip: int) -> Iterator[bytes]:
    buffer = bytearray()
    for portion in portions:
        passed = min(skip, len(portion))
        skip -= passed
        buffer += portion[passed:]
        while len(buffer) >= PORTION:
            yield bytes(buffer[:PORTION])
            del buffer[:PORTION]
    if buffer:
        yield bytes(buffer)


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: how to reach it, its layers, and the rights of this device there. `peer` is None for
    a worker on this machine that answers in plain text. `error` is the reason why the worker cannot be used; then
    `endpoint` and `facts` are None."""

    name: str
    peer: Peer | None
    endpoint: Endpoint | None = None
    facts: StoreFacts | None = None
    rights: Rights = frozenset()
    error: EdgeError | None = None

    @property
    def address(self) -> Address | None:
        return None if self.endpoint is None else self.endpoint.address

    def reached(self) -> Endpoint:
        """Return the endpoint. Raises EdgeError: the worker cannot be used."""
        if self.endpoint is None:
            raise self.error or NotPaired(f"No address of {self.name} is known.", "Check that it is on and serves.")
        return self.endpoint


def find_workers(trust: Trust, peers: Sequence[Peer], hosts: Sequence[str]) -> list[Worker]:
    """Return each of `peers` as a worker, as `ask_peers` finds them. Errors of a device are returned, not raised."""

    async def read(peer: Peer, address: Address) -> Worker:
        return await ask_worker(Endpoint(peer.name, address, trust, peer.id))

    return [
        Worker(peer.name, peer, error=answer) if isinstance(answer, EdgeError) else answer
        for peer, answer in ask_peers(peers, read, hosts, every_hint=True)
    ]


def worker_at(where: Endpoint) -> Worker:
    """Return the worker at an endpoint, as `ask_worker`. Errors of a device are returned, not raised."""
    try:
        return run_in_network_loop(ask_worker(where)).result()
    except EdgeError as error:
        return Worker(where.name, None, error=error)


async def ask_worker(where: Endpoint) -> Worker:
    """Return the worker at an endpoint. A paired device that is named by its address gets its name in the list of
    peers."""
    if where.trust is None:
        await check_open(where.address)
    channel, info = await where.meet()
    peer, rights = (None, frozenset(Right)) if info is None else (info.peer, info.rights)
    if peer is not None:
        name = peer.name if where.name == str(where.address) else where.name
        where = replace(where, name=name, device=peer.id)
    async with channel:
        return Worker(where.name, peer, where, await list_layers(channel, where.name), rights)

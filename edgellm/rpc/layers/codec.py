"""Conversion of manifests and pieces between protobuf messages and the store's records, and constants of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    NotPermitted,
    ProtocolError,
    StoreBusy,
    StoreFull,
)
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.versions import parse_message
from edgellm.storage.layers.manifest import MAX_PIECES, LayerPiece, Manifest
from edgellm.storage.layers.store import HeldModel, StoreFacts

M = TypeVar("M", bound=Message)

PROTOCOL = 1
WINDOW = 2**20  # most unacknowledged bytes in flight
FRAME = 2**18  # bytes of a portion that this side sends
REPLY_SECONDS = 30.0  # the sender's wait for a reply or a heartbeat

CONTRACT = pb.DESCRIPTOR.services_by_name["Layers"]
_ERRORS: dict[str, type[EdgeError]] = {
    "FAILED_PRECONDITION": ProtocolError,
    "INVALID_ARGUMENT": LayersRefused,
    "DATA_LOSS": LayersCorrupt,
    "RESOURCE_EXHAUSTED": StoreFull,
    "ABORTED": StoreBusy,
    "NOT_FOUND": LayersMissing,
    "OUT_OF_RANGE": MeasureFailed,
}
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

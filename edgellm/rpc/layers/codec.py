"""Conversion of manifests and pieces between protobuf messages and the store's records, and constants of both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from edgellm.errors import (
    SAME_VERSION,
    DeviceLost,
    DiskFull,
    EdgeError,
    LayersCorrupt,
    LayersMissing,
    LayersRefused,
    MeasureFailed,
    NotPermitted,
    PeerTooNew,
    PeerTooOld,
    ProtocolError,
    StoreBusy,
    StoreFull,
)
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method
from edgellm.rpc.trust.trust import Right
from edgellm.storage.layers.manifest import MAX_PIECES, LayerPiece, Manifest
from edgellm.storage.layers.store import HeldModel, StoreFacts

T = TypeVar("T")

PROTOCOL = 1
WINDOW = 2**20  # most unacknowledged bytes in flight
FRAME = 2**18  # bytes of a portion that this side sends
MAX_PORTION = 2**20
SILENT_SECONDS = 60.0  # the device's wait for a portion
REPLY_SECONDS = 30.0  # the sender's wait for a reply or a heartbeat
BEAT_SECONDS = 1.0

SERVICE = pb.DESCRIPTOR.services_by_name["Layers"].full_name
_STATUS: tuple[tuple[grpc.StatusCode, tuple[type[EdgeError], ...], type[EdgeError] | None], ...] = (
    (grpc.StatusCode.FAILED_PRECONDITION, (PeerTooOld, PeerTooNew), ProtocolError),
    (grpc.StatusCode.INVALID_ARGUMENT, (ProtocolError,), LayersRefused),
    (grpc.StatusCode.DATA_LOSS, (LayersCorrupt,), LayersCorrupt),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, (StoreFull, DiskFull), StoreFull),
    (grpc.StatusCode.ABORTED, (StoreBusy,), StoreBusy),
    (grpc.StatusCode.INVALID_ARGUMENT, (LayersRefused,), LayersRefused),
    (grpc.StatusCode.NOT_FOUND, (LayersMissing,), LayersMissing),
    (grpc.StatusCode.DEADLINE_EXCEEDED, (DeviceLost,), None),
    (grpc.StatusCode.OUT_OF_RANGE, (EdgeError,), MeasureFailed),
)
"""Status codes, the errors that they stand for, and the error that the other side raises; None: the device is lost."""


def method(name: str) -> str:
    """Return the gRPC path of one of the service's methods."""
    return f"/{SERVICE}/{name}"


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


def with_error_status(
    method: Method, guard: AuthInterceptor | None, right: Right, notify: Callable[[str], None]
) -> Any:
    """Wrap `method`: callers need this right if there is a `guard`, and an EdgeError ends the call with its message."""

    async def answering(request: Any, context: Context) -> Any:
        try:
            return await method(request, context)
        except EdgeError as error:
            notify(error.what)
            await context.abort(_status(error), f"{error.what}\n{error.next_step}")

    return answering if guard is None else guard.wrap(answering, right)


async def in_thread(work: Callable[[], T], beat: Callable[[], Awaitable[Any]] | None = None) -> T:
    """Run slow work in a thread, and call `beat` every second meanwhile. If the call is cancelled, wait for the work
    all the same, so that no file is closed under it."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        while not (await asyncio.wait({task}, timeout=BEAT_SECONDS))[0]:
            if beat is not None:
                await beat()
        return task.result()
    finally:
        if not task.done():
            await asyncio.wait({task})


@contextmanager
def call_errors(name: str) -> Iterator[None]:
    """Raise the status of a failed call to `name` as an error of ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error.code(), error.details(), name) from None


def _status(error: EdgeError) -> grpc.StatusCode:
    return next(code for code, kinds, _ in _STATUS if isinstance(error, kinds))


def error_from_status(code: grpc.StatusCode, text: str | None, name: str) -> EdgeError:
    """Return the error that the other side, `name`, gave as the status of a call, or DeviceLost."""
    what, _, step = (text or "").partition("\n")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{name} does not store layers.", "Start a worker there: edgellm serve --role worker")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"{name} refuses: {what}", step or "Ask the device's owner for the right.")
    for status_code, _, kind in _STATUS:
        if status_code is code and kind is not None:
            return kind(f"{name}: {what}", step or "Check the messages on that device.")
    return DeviceLost(
        f"The connection to {name} was lost ({code.name.lower()}: {text}).",
        "Try again; what has arrived there is kept.",
    )


def refusal(error: EdgeError) -> pb.Refused:
    return pb.Refused(status=_status(error).value[0], what=error.what, next_step=error.next_step)


def error_from_refusal(message: pb.Refused, name: str) -> EdgeError:
    """Return the error that the other side, `name`, sent in the middle of a call."""
    code = next((code for code in grpc.StatusCode if code.value[0] == message.status), grpc.StatusCode.UNKNOWN)
    return error_from_status(code, f"{message.what}\n{message.next_step}", name)

"""Conversion of manifests and pieces between protobuf messages and the store's records, and constants of both sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from edgellm.errors import (
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
from edgellm.storage.layers.manifest import PIECES_MOST, LayerPiece, Manifest

PROTOCOL = 1
WINDOW = 2**20  # most bytes in flight, unacknowledged
FRAME = 2**18  # bytes of a portion that this side sends
PORTION_MOST = 2**20
SILENT_SECONDS = 60.0  # how long the device waits for a portion
REPLY_SECONDS = 30.0  # how long the sender waits for a sign of life
BEAT_SECONDS = 1.0

_SERVICE = pb.DESCRIPTOR.services_by_name["Layers"]
SERVICE = _SERVICE.full_name


def method(name: str) -> str:
    """Return the gRPC path of one of the service's methods."""
    return f"/{SERVICE}/{_SERVICE.methods_by_name[name].name}"


def write_pieces(pieces: Iterable[LayerPiece]) -> list[pb.Piece]:
    return [pb.Piece(first=one.first, last=one.last, size=one.size, sha256=bytes.fromhex(one.sha256)) for one in pieces]


def read_pieces(messages: Sequence[pb.Piece]) -> tuple[LayerPiece, ...]:
    """Convert pieces from their messages. Raise LayersRefused for values that cannot be valid."""
    if len(messages) > PIECES_MOST:
        raise LayersRefused(f"{len(messages)} pieces of one model are more than {PIECES_MOST}.", _UPDATE)
    return tuple(LayerPiece(one.first, one.last, one.size, one.sha256.hex()) for one in messages)


def write_manifest(manifest: Manifest) -> pb.Recipe:
    return pb.Recipe(
        fingerprint=bytes.fromhex(manifest.fingerprint), name=manifest.name, architecture=manifest.architecture,
        layers=manifest.layers, pieces=write_pieces(manifest.pieces),
    )  # fmt: skip


def read_manifest(message: pb.Recipe) -> Manifest:
    """Convert a manifest from its message. Raise LayersRefused for values that cannot be valid."""
    pieces = read_pieces(message.pieces)
    return Manifest(message.fingerprint.hex(), message.name, message.architecture, message.layers, pieces)


def read_places(places: Sequence[int], manifest: Manifest) -> list[int]:
    """Return the places of the wanted pieces in a manifest, checked.

    Raises:
        ProtocolError: there are no such pieces, none are named, or they are not in order.
    """
    found = list(places)
    if not found or found != sorted(set(found)) or found[-1] >= len(manifest.pieces):
        raise ProtocolError(f"There cannot be a wish for the pieces {found[:20]}.", _UPDATE)
    return found


def status(error: EdgeError) -> grpc.StatusCode:
    """Return the gRPC status for an error."""
    return next((code for kind, code in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details(error: EdgeError) -> str:
    return f"{error.what}\n{error.next_step}"


def error_from_status(code: grpc.StatusCode, text: str | None, who: str) -> EdgeError:
    """Return the error that the other side, `who`, gave as the status of a call, or that it is gone."""
    what, _, step = (text or "").partition("\n")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"{who} keeps no layers.", "Start a worker there: edgellm serve --role worker")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"{who} refuses: {what}", step or "Ask its owner.")
    for kind, its in _ERRORS:
        if its is code:
            return kind(f"{who}: {what}", step or "See what is said there.")
    return DeviceLost(f"{who} is gone ({code.name.lower()}: {text}).", "What has arrived there is kept: try again.")


def refusal(error: EdgeError) -> pb.Refused:
    return pb.Refused(status=status(error).value[0], what=error.what, next_step=error.next_step)


def error_from_refusal(said: pb.Refused, who: str) -> EdgeError:
    """Return the error that the other side, `who`, sent in the middle of a call."""
    code = next((code for code in grpc.StatusCode if code.value[0] == said.status), grpc.StatusCode.UNKNOWN)
    return error_from_status(code, f"{said.what}\n{said.next_step}", who)


_STATUS: tuple[tuple[type[EdgeError], grpc.StatusCode], ...] = (
    (PeerTooOld, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerTooNew, grpc.StatusCode.FAILED_PRECONDITION),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (LayersCorrupt, grpc.StatusCode.DATA_LOSS),
    (StoreFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StoreBusy, grpc.StatusCode.ABORTED),
    (LayersRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (LayersMissing, grpc.StatusCode.NOT_FOUND),
    (DeviceLost, grpc.StatusCode.DEADLINE_EXCEEDED),
    (EdgeError, grpc.StatusCode.OUT_OF_RANGE),
)
_ERRORS: tuple[tuple[type[EdgeError], grpc.StatusCode], ...] = (
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (LayersRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (LayersCorrupt, grpc.StatusCode.DATA_LOSS),
    (StoreFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StoreBusy, grpc.StatusCode.ABORTED),
    (LayersMissing, grpc.StatusCode.NOT_FOUND),
    (MeasureFailed, grpc.StatusCode.OUT_OF_RANGE),
)
_UPDATE = "Run the same version of edgellm on both sides."

"""Pieces of a model, and how they come into a store."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from edgellm.engine import ModelFile, check_cuttable, check_gguf
from edgellm.layer_range import LayerRange
from edgellm.storage.layer_pieces import LayerPiece, Manifest, cut_piece, manifest_of, pieces_of
from edgellm.storage.layer_store import OWN, LayerStore


def cut_layers(model: Path, into: LayerStore, layers: LayerRange) -> Manifest:
    """Cuts a stage with these layers on the grid; returns its pieces."""
    manifest = manifest_of(ModelFile.open(model), [layers])
    put(into, model, manifest, manifest.covering(layers))
    return manifest


def cut_singly(model: Path, into: LayerStore, layers: LayerRange = LayerRange(0, 8)) -> Manifest:
    """Cuts these layers, each as a piece of its own; returns such pieces of the whole model."""
    manifest = layerwise(model)
    put(into, model, manifest, manifest.covering(layers))
    return manifest


def part(manifest: Manifest, *pieces: LayerPiece) -> Manifest:
    return replace(manifest, pieces=pieces)


def put(
    store: LayerStore, model: Path, manifest: Manifest, pieces: Iterable[LayerPiece], owner: str = OWN,
    share: float = 1.0,
) -> None:  # fmt: skip
    """Puts pieces into a store, or a `share` of the bytes of each, as another device or program would."""
    wanted = part(manifest, *pieces)
    for piece, arrived in zip(wanted.pieces, store.reserve(wanted, owner), strict=True):
        if arrived < piece.size:
            store.append(piece, arrived, bytes_of(model, piece)[arrived : int(share * piece.size)], owner)


def layerwise(model: Path) -> Manifest:
    """Each layer as a piece of its own, as large models are cut."""
    return pieces_of(ModelFile.open(model), [LayerRange(at, at + 1) for at in range(check_cuttable(check_gguf(model)))])


def bytes_of(model: Path, piece: LayerPiece) -> bytes:
    return b"".join(map(bytes, cut_piece(ModelFile.open(model), piece.layers)))

"""Pieces of a model, and how they come into a store."""

from pathlib import Path

from edgellm.engine import ModelFile, check_cuttable, check_gguf
from edgellm.layer_range import LayerRange
from edgellm.storage import layer_store as store
from edgellm.storage.layer_pieces import LayerPiece, Manifest, cut_piece, manifest_of, pieces_of
from edgellm.storage.layer_store import LayerStore


def cut_layers(model: Path, into: LayerStore, layers: LayerRange) -> Manifest:
    """Cuts a stage with these layers on the grid; returns its pieces."""
    manifest = manifest_of(ModelFile.open(model), [layers])
    store.cut_layers(ModelFile.open(model), manifest, layers, into)
    return manifest


def cut_singly(model: Path, into: LayerStore, layers: LayerRange = LayerRange(0, 8)) -> Manifest:
    """Cuts these layers, each as a piece of its own; returns such pieces of the whole model."""
    manifest = layerwise(model)
    store.cut_layers(ModelFile.open(model), manifest, layers, into)
    return manifest


def layerwise(model: Path) -> Manifest:
    """Each layer as a piece of its own, as large models are cut."""
    return pieces_of(ModelFile.open(model), [LayerRange(at, at + 1) for at in range(check_cuttable(check_gguf(model)))])


def bytes_of(model: Path, manifest: Manifest, piece: LayerPiece) -> bytes:
    return b"".join(map(bytes, cut_piece(ModelFile.open(model), piece.layers)))

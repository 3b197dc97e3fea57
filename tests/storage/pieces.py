"""Pieces of a model, and how they come into a store."""

from pathlib import Path

from edgellm.engine import ModelFile, check_cuttable, check_gguf
from edgellm.layer_range import LayerRange
from edgellm.storage.layer_pieces import LayerPiece, Manifest, cut_piece, manifest_of, pieces_of
from edgellm.storage.layer_store import LayerStore


def cut_layers(model: Path, into: LayerStore, layers: LayerRange) -> Manifest:
    """Cuts a stage with these layers on the grid; returns its pieces."""
    return _put(model, into, manifest_of(ModelFile.open(model), [layers]), layers)


def cut_singly(model: Path, into: LayerStore, layers: LayerRange = LayerRange(0, 8)) -> Manifest:
    """Cuts these layers, each as a piece of its own; returns such pieces of the whole model."""
    return _put(model, into, layerwise(model), layers)


def _put(model: Path, into: LayerStore, manifest: Manifest, layers: LayerRange) -> Manifest:
    """Puts the pieces of these layers into a store, as another program of this machine would."""
    pieces = manifest.covering(layers)
    with into.receiving(manifest, pieces) as receive:
        for piece in pieces:
            if into.find(piece) is None:
                with receive(piece) as incoming:
                    incoming.append(bytes_of(model, manifest, piece)[incoming.size :])
                    incoming.finish()
    return manifest


def layerwise(model: Path) -> Manifest:
    """Each layer as a piece of its own, as large models are cut."""
    return pieces_of(ModelFile.open(model), [LayerRange(at, at + 1) for at in range(check_cuttable(check_gguf(model)))])


def bytes_of(model: Path, manifest: Manifest, piece: LayerPiece) -> bytes:
    return b"".join(map(bytes, cut_piece(ModelFile.open(model), piece.layers)))

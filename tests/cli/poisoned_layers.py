"""Layers that differ from their manifest: with other weights, or with some that make llama.cpp end the process."""

from __future__ import annotations

import hashlib
import shutil
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

from edgellm.engine import ModelFile, check_gguf
from edgellm.storage.layers.manifest import LayerPiece, Manifest, cut_piece

FIRST, LAST = 6, 11  # the layers of the worker, counted from 0


_I32 = 26  # a tensor type that llama.cpp cannot use for a norm


Bytes = dict[LayerPiece, bytes]


def honest(manifest: Manifest, model: Path) -> Bytes:
    return {piece: b"".join(map(bytes, cut_piece(ModelFile.open(model), piece.layers)))
            for piece in manifest.pieces}  # fmt: skip


def garbled(manifest: Manifest, model: Path) -> Bytes:
    """Return layers with other weights, which load and compute nonsense."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.gguf"
        shutil.copyfile(model, copy)
        with copy.open("r+b") as file:
            for tensor in check_gguf(copy).tensors:
                if tensor.name.endswith(("ffn_down.weight", "attn_output.weight")):
                    file.seek(tensor.offset)
                    file.write(bytes(tensor.nbytes))
        return honest(manifest, copy)


def deadly(manifest: Manifest, model: Path) -> Bytes:
    """Return layers with a norm of integers, with which llama.cpp ends the process."""
    return {piece: _retyped(data, "blk.0.attn_norm.weight", _I32) for piece, data in honest(manifest, model).items()}


def _retyped(data: bytes, tensor: str, kind: int) -> bytes:
    at = data.index(tensor.encode()) + len(tensor)
    (dimensions,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * dimensions
    return data[:at] + struct.pack("<I", kind) + data[at + 4 :]


def claimed(manifest: Manifest, pieces: Bytes) -> tuple[Manifest, Bytes]:
    """Return a manifest that claims other bytes as layers of the same model, and its pieces."""
    made = {
        replace(piece, size=len(data), sha256=hashlib.sha256(data).hexdigest()): data for piece, data in pieces.items()
    }
    return replace(manifest, pieces=tuple(made)), made

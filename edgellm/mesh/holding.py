"""Where a worker's layers lie: the seam between the mesh and whatever keeps layers on a device's disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

from edgellm.engine import check_gguf, cut
from edgellm.engine.shard import check_cuttable
from edgellm.errors import LayersMissing
from edgellm.mesh.split import ranges
from edgellm.store import cache_dir, fingerprint

ENOUGH = 32 * 2**20  # bytes


class Layers(Protocol):
    """Layers of models, in a file each (`engine.cut` of one layer), or several in a row in one: the first carries the
    embedding and the tokenizer, the last one norm and head. Models are known by the SHA-256 of their whole file, in
    hex."""

    def find(self, model: str, layer: int, last: int) -> Path | None:
        """A file that begins with `layer`, counted from 0, and ends with `last` or before it, wherever that suits; None
        where it is not here, or not whole."""
        ...

    def held(self, model: str) -> frozenset[int]:
        """The layers that are here."""
        ...


class SeveralLayers:
    """Layers that are in one place or another."""

    def __init__(self, *places: Layers) -> None:
        self._places = places

    def find(self, model: str, layer: int, last: int) -> Path | None:
        return next((path for place in self._places if (path := place.find(model, layer, last)) is not None), None)

    def held(self, model: str) -> frozenset[int]:
        return frozenset().union(*(place.held(model) for place in self._places))


class WholeModel:
    """A model file of this device, of which pieces are cut when they are asked for, and kept.

    Small layers go together: a block costs a sixth of a millisecond for every pass (`python -m bench.mesh_cost`), and a
    piece of `ENOUGH` bytes is loaded in less time than a first token takes.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        """Raises ModelNotFound, ModelCorrupt or ModelUnsupported where it cannot be cut, and OSError where it cannot be
        read."""
        self.path = path
        header = check_gguf(path)
        self.layers = check_cuttable(header)
        self.model = fingerprint(path)
        self._folder = (folder or cache_dir() / "mesh") / self.model
        blocks = sum(tensor.nbytes for tensor in header.tensors if tensor.name.startswith("blk."))
        self._together = max(1, ENOUGH * self.layers // max(1, blocks))

    def find(self, model: str, layer: int, last: int) -> Path | None:
        if model != self.model or not 0 <= layer < self.layers:
            return None
        end = min(last, layer + self._together - 1)
        path = self._folder / f"{layer:04d}-{end:04d}.gguf"
        if not path.is_file():
            _cut(self.path, path, layer, end, self.layers)
        return path

    def held(self, model: str) -> frozenset[int]:
        return frozenset(range(self.layers)) if model == self.model else frozenset()


def _cut(model: Path, path: Path, first: int, last: int, layers: int) -> None:
    """Cuts a piece. Several processes may do so at once: each writes a file of its own, which then takes the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.stem}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        cut(model, own, first, last, head=last == layers - 1)
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def require(layers: Layers, model: str, first: int, last: int, name: str) -> None:
    """Raises LayersMissing where one of the layers `first` to `last` is not here."""
    missing = sorted(set(range(first, last + 1)) - layers.held(model))
    if missing:
        raise LayersMissing(
            f"Layer{'s' if len(missing) > 1 else ''} {ranges(missing)} of {name} {'are' if len(missing) > 1 else 'is'}"
            " not on this device.",
            "Bring them there first, or start the worker with the whole model: edgellm serve --role worker -m MODEL",
        )

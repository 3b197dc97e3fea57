"""Layers of models in a folder: where the tests keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from edgellm.engine import GgufHeader, Model, check_gguf, cut
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.layer_range import LayerRange, chain
from edgellm.mesh.layer_sources import LayerFile, require
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.weight_cache import MemoryReservation, WeightCache
from edgellm.storage import fingerprint
from edgellm.storage.layers.manifest import LayerPiece


class FolderLayers:
    """A folder with a folder for each model, in which layers lie as 0000.gguf, 0001.gguf and so on, or several in each
    file, named by the first. `before` is called with the layers of a file that is used."""

    def __init__(
        self, folder: Path, per_file: int = 1, before: Callable[[LayerRange], None] = lambda _layers: None
    ) -> None:
        self.folder, self.per_file, self.before = folder, per_file, before

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> FolderModel | None:
        found = FolderModel(self, model)
        return found if found.held else None

    def path(self, model: str, layer: int) -> Path:
        """Where a layer lies, or would."""
        return self.folder / model / f"{layer:04d}.gguf"

    def cut(self, model: Path, layers: Sequence[int] | None = None) -> str:
        """Cuts `layers` of a model file, by default all, where they are not here yet; returns the model's hash."""
        n = check_cuttable(check_gguf(model))
        digest = fingerprint(model)
        for layer in range(0, n, self.per_file) if layers is None else layers:
            path = self.path(digest, layer)
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                last = layer + self.per_file - 1
                cut(model, path, layer, last, head=last == n - 1)
        return digest


class FolderModel:
    def __init__(self, folder: FolderLayers, model: str) -> None:
        self._folder, self._model = folder, model
        starts = [int(path.stem) for path in (folder.folder / model).glob("*.gguf")]
        self._ranges = {LayerRange(at, at + folder.per_file): folder.path(model, at) for at in sorted(starts)}
        self.held = frozenset(layer for layers in self._ranges for layer in layers)
        self.pieces = None if folder.per_file == 1 else tuple(self._ranges)
        self.keys = (model,)

    def files(self, layers: LayerRange) -> Sequence[LayerFile]:
        return [
            LayerFile(one, self._ranges[one].stat().st_size, self._model, partial(self._using, one))
            for one in chain(self._ranges, layers)
        ]

    def header(self) -> GgufHeader:
        return check_gguf(min(self._ranges.values()))

    @contextmanager
    def _using(self, layers: LayerRange) -> Iterator[Path]:
        self._folder.before(layers)
        yield self._ranges[layers]


def take(weights: WeightCache, model: str, first: int, stop: int | None = None) -> Model:
    """The first file of a stage with these layers, loaded."""
    found = weights.layers.open(model)
    assert found is not None
    return weights.acquire(found.files(LayerRange(first, first + 1 if stop is None else stop))[0])


def warm(weights: WeightCache, model: str) -> frozenset[int]:
    found = weights.layers.open(model)
    assert found is not None
    return weights.warm(found)


def reserve(weights: WeightCache, work: StageSpec) -> MemoryReservation:
    return weights.reserve(work, *require(weights.layers, work))

"""Layers of models in a folder, one file each: where the tests keep them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from edgellm.engine import GgufHeader, check_gguf, cut
from edgellm.engine.gguf.shard import check_cuttable
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import CutPoints, LoadableLayers
from edgellm.storage import fingerprint


class FolderLayers:
    """A folder with a folder for each model, in which layers lie as 0000.gguf, 0001.gguf and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, model: str, layers: LayerRange) -> Path | None:
        path = self.path(model, layers.start)
        return path if path.is_file() else None

    def held(self, model: str) -> frozenset[int]:
        found = (self.folder / model).glob("*.gguf")
        return frozenset(int(path.stem) for path in found if path.stem.isdecimal())

    def bounds(self, model: str) -> CutPoints:
        return CutPoints(self.held(model), self.held(model))

    def tidy(self, loaded: Collection[Path]) -> None:
        """Nobody removes them."""

    def pieces(self, model: str, layers: LayerRange) -> Sequence[LoadableLayers]:
        there = self.held(model)
        return [
            LoadableLayers(LayerRange(layer, layer + 1), self.path(model, layer).stat().st_size)
            for layer in layers if layer in there
        ]  # fmt: skip

    def header(self, model: str) -> GgufHeader | None:
        return check_gguf(self.path(model, min(self.held(model)))) if self.held(model) else None

    def path(self, model: str, layer: int) -> Path:
        """Where a layer lies, or would."""
        return self.folder / model / f"{layer:04d}.gguf"

    def cut(self, model: Path, layers: Sequence[int] | None = None) -> str:
        """Cuts `layers` of a model file, by default all, where they are not here yet; returns the model's hash."""
        n = check_cuttable(check_gguf(model))
        digest = fingerprint(model)
        for layer in range(n) if layers is None else layers:
            path = self.path(digest, layer)
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                cut(model, path, layer, layer, head=layer == n - 1)
        return digest

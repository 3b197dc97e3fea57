"""Layers of models in a folder: where the tests keep them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from edgellm.engine import Model, check_gguf, cut
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.layer_range import LayerRange, chain
from edgellm.mesh.layer_sources import LayerFile, ModelLayers, require
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.weight_cache import WeightCache
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layer_pieces import LayerPiece


class FolderLayers:
    """A folder with a folder for each model, in which layers lie as 0000.gguf, 0001.gguf and so on, or several in each
    file, named by the first. `before` is called with the layers of a file that is used."""

    def __init__(
        self, folder: Path, per_file: int = 1, before: Callable[[LayerRange], None] = lambda _layers: None
    ) -> None:
        self.folder, self.per_file, self.before = folder, per_file, before

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> ModelLayers | None:
        starts = sorted(int(path.stem) for path in (self.folder / model).glob("*.gguf"))
        here = {LayerRange(at, at + self.per_file): self.path(model, at) for at in starts}

        @contextmanager
        def using(layers: LayerRange) -> Iterator[Path]:
            self.before(layers)
            yield here[layers]

        def files(layers: LayerRange) -> Sequence[LayerFile]:
            found = chain(here, layers)
            return [LayerFile(one, here[one].stat().st_size, model, partial(using, one)) for one in found]

        held = frozenset(layer for layers in here for layer in layers)
        split = None if self.per_file == 1 else tuple(here)
        return (
            ModelLayers(held, split, frozenset((model,)), files, lambda: check_gguf(min(here.values())))
            if here
            else None
        )

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


def take(weights: WeightCache, model: str, first: int, stop: int | None = None) -> tuple[Model, ExitStack]:
    """The first file of a stage with these layers, loaded, and its reservation."""
    found = weights.layers.open(model)
    assert found is not None
    file = found.files(LayerRange(first, first + 1 if stop is None else stop))[0]
    reservation = weights.reserve_bytes(0, f"Layer {first}", [file])
    return weights.acquire(file), reservation


def warm(weights: WeightCache, model: str) -> frozenset[int]:
    found = weights.layers.open(model)
    assert found is not None
    return weights.warm(found)


def reserve(weights: WeightCache, work: StageSpec) -> ExitStack:
    return weights.reserve(work, *require(weights.layers, work))


def needed(layers: FolderLayers, work: StageSpec) -> int:
    """The bytes that a stage takes, with its weights."""
    roomy, limit = WeightCache(layers, memory=10**9), 10**9
    reserve(roomy, work)
    return limit - roomy.available() + sum(layers.path(work.model, one).stat().st_size for one in work.layers)

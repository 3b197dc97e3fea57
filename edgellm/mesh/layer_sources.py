"""The sources from which a stage gets its layers: a whole model, or pieces that were brought to this device."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from edgellm.engine import GgufHeader, check_gguf, cut, join
from edgellm.engine.gguf.shard import check_cuttable
from edgellm.errors import DiskFull, LayersMissing, StoreFull
from edgellm.layer_range import LayerRange, ranges
from edgellm.mesh.messages import StageSpec
from edgellm.storage import fingerprint
from edgellm.storage.layers.manifest import LayerPiece, Recipe
from edgellm.storage.layers.store import LayerStore, together


@dataclass(frozen=True, slots=True)
class CutPoints:
    """The layers with which a stage may begin, and those with which it may end."""

    begins: frozenset[int]
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class LoadableLayers:
    """Layers as `find` gives them, of about `size` bytes."""

    layers: LayerRange
    size: int


class Layers(Protocol):
    """Layers of models, in files of one layer (`engine.cut`) or several in a row: the first layer carries the embedding
    and the tokenizer, the last one norm and head. A model is known by the SHA-256 of its whole file if this device has
    that file, and by the digest of its recipe if pieces were copied here; both in hex."""

    def find(self, model: str, layers: LayerRange) -> Path | None:
        """Return a file that begins with the first of `layers`, and ends with the last of them or before it; None if it
        is not here, or not whole. The file is not removed until `tidy` is told that it is not loaded."""
        ...

    def held(self, model: str) -> frozenset[int]:
        """Return the layers that are here."""
        ...

    def bounds(self, model: str) -> CutPoints:
        """Return the layers at which a stage may begin and end, so that no piece has to be cut in two."""
        ...

    def pieces(self, model: str, layers: LayerRange) -> Sequence[LoadableLayers]:
        """Return what `find` would give for these layers, one after the other, up to the first that is not here."""
        ...

    def header(self, model: str) -> GgufHeader | None:
        """Return the header of the whole model, or of some of its layers; None if nothing of the model is here."""
        ...

    def tidy(self, loaded: Collection[Path]) -> None:
        """Release the files that were found and are not `loaded`, or no longer."""
        ...


def known_as(layers: Layers, model: str, recipe: str) -> str:
    """Return the key by which `layers` know a model: `model`, the SHA-256 of the coordinator's file, or the digest of
    its `recipe`. A whole file on this device goes before pieces copied to it."""
    return model if layers.held(model) or not recipe else recipe


class InUse:
    """Files that must not be removed because they are loaded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Path, ExitStack] = {}

    def keep(self, using: AbstractContextManager[Path]) -> Path:
        """Enter `using` and return its file; keep the context open until `tidy`. Raise what `using` raises."""
        with ExitStack() as held:
            path = held.enter_context(using)
            with self._lock:
                if path not in self._held:
                    self._held[path] = held.pop_all()
        return path

    def tidy(self, loaded: Collection[Path]) -> None:
        """See `Layers.tidy`."""
        with self._lock:
            for path in [path for path in self._held if path not in loaded]:
                self._held.pop(path).close()


class SeveralLayers:
    """Layers from several places; for each model, at most one place has pieces of several layers that it cannot cut."""

    def __init__(self, *places: Layers) -> None:
        self._places = places

    def find(self, model: str, layers: LayerRange) -> Path | None:
        return next((path for place in self._places if (path := place.find(model, layers)) is not None), None)

    def held(self, model: str) -> frozenset[int]:
        return frozenset().union(*(place.held(model) for place in self._places))

    def bounds(self, model: str) -> CutPoints:
        every = [place.bounds(model) for place in self._places]
        return CutPoints(
            frozenset().union(*(one.begins for one in every)), frozenset().union(*(one.ends for one in every))
        )

    def pieces(self, model: str, layers: LayerRange) -> Sequence[LoadableLayers]:
        found: list[LoadableLayers] = []
        while len(layers):
            row = next((row for place in self._places if (row := place.pieces(model, layers))), ())
            if not row:
                break
            found.append(row[0])
            layers = LayerRange(row[0].layers.stop, layers.stop)
        return found

    def header(self, model: str) -> GgufHeader | None:
        return next((header for place in self._places if (header := place.header(model)) is not None), None)

    def tidy(self, loaded: Collection[Path]) -> None:
        for place in self._places:
            place.tidy(loaded)


class WholeModel:
    """A model file of this device. Pieces are cut from it on demand, and kept in a store of layers for the next time,
    as far as the store's limit allows. Small layers go together (`edgellm.storage.layers.store`)."""

    def __init__(self, path: Path, store: LayerStore | None = None) -> None:
        """Check that the file can be cut. `store` defaults to the user's own.

        Raises ModelNotFound, ModelCorrupt or ModelUnsupported if the file cannot be cut, and OSError if it cannot be
        read."""
        header = check_gguf(path)
        self.path, self.model, self.n_layers = path, fingerprint(path), check_cuttable(header)
        tensors = header.tensors
        self._size = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith("blk.")) / self.n_layers
        self._ends = sum(tensor.nbytes for tensor in tensors if not tensor.name.startswith("blk."))
        self._store, self._used = store or LayerStore(), InUse()

    def find(self, model: str, layers: LayerRange) -> Path | None:
        if model != self.model or not 0 <= layers.start < layers.stop <= self.n_layers:
            return None
        piece = self._piece(layers)
        first, last = piece.layers.start, piece.layers.last

        def make(path: Path) -> None:
            cut(self.path, path, first, last, head=piece.layers.stop == self.n_layers)

        return self._used.keep(self._store.made.using(model, first, last, piece.size, make))

    def _piece(self, layers: LayerRange) -> LoadableLayers:
        found = LayerRange(layers.start, together(layers.start, layers.last, self._size) + 1)
        at_an_end = found.start == 0 or found.stop == self.n_layers
        return LoadableLayers(found, int(len(found) * self._size) + at_an_end * self._ends)

    def held(self, model: str) -> frozenset[int]:
        return frozenset(range(self.n_layers)) if model == self.model else frozenset()

    def bounds(self, model: str) -> CutPoints:
        return CutPoints(self.held(model), self.held(model))

    def pieces(self, model: str, layers: LayerRange) -> Sequence[LoadableLayers]:
        found: list[LoadableLayers] = []
        while model == self.model and len(layers):
            found.append(self._piece(layers))
            layers = LayerRange(found[-1].layers.stop, layers.stop)
        return found

    def header(self, model: str) -> GgufHeader | None:
        return check_gguf(self.path) if model == self.model else None

    def tidy(self, loaded: Collection[Path]) -> None:
        self._used.tidy(loaded)


def require(source: Layers, work: StageSpec) -> None:
    """Raise LayersMissing if one of the stage's layers is not here."""
    missing, name = sorted(set(work.layers) - source.held(work.model)), work.name
    if missing:
        raise LayersMissing(
            f"Layer{'s' if len(missing) > 1 else ''} {ranges(missing)} of {name} {'are' if len(missing) > 1 else 'is'}"
            " not on this device.",
            "Bring them there first, or start the worker with the whole model: edgellm serve --role worker -m MODEL",
        )


class StoredLayers:
    """The layers in a store. Models are known by the digest of their pieces' recipe, which names the exact bytes.

    The SHA-256 of a whole model's file finds nothing here. Layers count from 0. Thread-safe.

    Layers arrive and are kept one by one, so that any later plan can use them; small ones are joined where a stage
    wants several in a row, because each block has a cost in every pass.
    """

    def __init__(self, store: LayerStore) -> None:
        self.store = store
        self._used = InUse()

    def find(self, model: str, layers: LayerRange) -> Path | None:
        """See `Layers.find`."""
        recipe = self._recipe(model)
        row = [] if recipe is None else self._row(recipe, layers)
        if recipe is None or not row:
            return None
        try:
            try:
                return self._used.keep(self._file(recipe, row))
            except (StoreFull, DiskFull):  # no room for a joined file: the first piece can be loaded as it is
                return self._used.keep(self._file(recipe, row[:1]))
        except LayersMissing:  # a piece has just been removed
            return None

    def held(self, model: str) -> frozenset[int]:
        """Return the layers that are here."""
        return frozenset(layer for piece in self._here(model) for layer in piece.layers)

    def bounds(self, model: str) -> CutPoints:
        """Return the layers at which a stage may begin and end: those at which pieces do."""
        here = self._here(model)
        return CutPoints(frozenset(piece.first for piece in here), frozenset(piece.last for piece in here))

    def pieces(self, model: str, layers: LayerRange) -> Sequence[LoadableLayers]:
        """See `Layers.pieces`."""
        recipe, found = self._recipe(model), []
        while recipe is not None and len(layers) and (row := self._row(recipe, layers)):
            stop = row[-1].last + 1
            found.append(LoadableLayers(LayerRange(layers.start, stop), sum(piece.size for piece in row)))
            layers = LayerRange(stop, layers.stop)
        return found

    def header(self, model: str) -> GgufHeader | None:
        """See `Layers.header`. The last layer's header is preferred: it gives the size of the vocabulary, while the
        first layer's lists every token."""
        recipe, here = self._recipe(model), self._here(model)
        if recipe is None or not here:
            return None
        last = here[-1].last == recipe.layers - 1
        path = self.store.find(here[-1 if last else 0])
        return None if path is None else check_gguf(path)

    def tidy(self, loaded: Collection[Path]) -> None:
        """Release the files that are not loaded, or no longer."""
        self._used.tidy(loaded)

    def _row(self, recipe: Recipe, layers: LayerRange) -> list[LayerPiece]:
        """Return the pieces at the beginning of `layers` that are loaded as one file."""
        layer, last = layers.start, layers.last
        end = together(layer, last, median(piece.size / len(piece.layers) for piece in recipe.pieces))
        row: list[LayerPiece] = []
        for piece in recipe.pieces:
            if piece.first == (row[-1].last + 1 if row else layer):
                if piece.last > (end if row else last) or self.store.find(piece) is None:
                    break
                row.append(piece)
        return row

    @contextmanager
    def _file(self, recipe: Recipe, row: Sequence[LayerPiece]) -> Iterator[Path]:
        """Yield a row of pieces as one file. Raise LayersMissing if a piece is gone, and what joining them raises."""
        with self.store.using(row) as paths:
            if len(paths) == 1:
                yield paths[0]
                return
            first, last = row[0].first, row[-1].last

            def make(path: Path) -> None:
                join(paths, path, start=first == 0, head=last == recipe.layers - 1)

            size = sum(piece.size for piece in row)
            with self.store.made.using(recipe.fingerprint, first, last, size, make, recipe.digest) as path:
                yield path

    def _here(self, model: str) -> list[LayerPiece]:
        recipe = self._recipe(model)
        return [] if recipe is None else [piece for piece in recipe.pieces if self.store.find(piece) is not None]

    def _recipe(self, model: str) -> Recipe | None:
        try:
            return self.store.recipe(model)
        except LayersMissing:
            return None

"""The layers of a store, ready to load: small ones are joined, and loaded files stay until they are released."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from edgellm.engine import GgufHeader, check_gguf, join
from edgellm.errors import DiskFull, LayersMissing, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.mesh.runtime.layer_sources import CutPoints, InUse, Loadable
from edgellm.storage.layers.derived_pieces import together
from edgellm.storage.layers.manifest import LayerPiece, Recipe
from edgellm.storage.layers.store import LayerStore


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

    def pieces(self, model: str, layers: LayerRange) -> Sequence[Loadable]:
        """See `Layers.pieces`."""
        recipe, found = self._recipe(model), []
        while recipe is not None and len(layers) and (row := self._row(recipe, layers)):
            stop = row[-1].last + 1
            found.append(Loadable(LayerRange(layers.start, stop), sum(piece.size for piece in row)))
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

"""The layers of a store, one by one, for whoever loads them: what is loaded stays until it is let go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from edgellm.errors import LayersMissing
from edgellm.store.layers import LayerStore
from edgellm.store.recipe import Piece


class StoredLayers:
    """Models are known by the SHA-256 of their whole file, in hex; layers count from 0. Any thread may ask."""

    def __init__(self, store: LayerStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._used: dict[tuple[str, int], ExitStack] = {}

    def find(self, model: str, layer: int, last: int) -> Path | None:
        """The file that begins with a layer and ends with `last` or before it; None where it is not here, or not whole.
        From now on nobody removes it, until `tidy` says that it is no longer loaded."""
        piece = self._pieces(model).get(layer)
        if piece is None or piece.last > last:
            return None
        with self._lock:
            if (model, layer) not in self._used:
                held = ExitStack()
                try:
                    held.enter_context(self.store.using([piece]))
                except LayersMissing:
                    return None
                self._used[model, layer] = held
        return self.store.find(piece)

    def held(self, model: str) -> frozenset[int]:
        """The layers that are here."""
        here = [piece for piece in self._pieces(model).values() if self.store.find(piece) is not None]
        return frozenset(layer for piece in here for layer in range(piece.first, piece.last + 1))

    def tidy(self, loaded: Callable[[str], frozenset[int]]) -> None:
        """Lets go of the files of layers that are no longer loaded; `loaded` says which of a model are."""
        with self._lock:
            for model, layer in [key for key in self._used if key[1] not in loaded(key[0])]:
                self._used.pop((model, layer)).close()

    def _pieces(self, model: str) -> dict[int, Piece]:
        try:
            recipe = self.store.recipe(model)
        except LayersMissing:
            return {}
        return {piece.first: piece for piece in recipe.pieces}

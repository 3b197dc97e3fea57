"""The sources of a worker's layers: the interface between the mesh and the code that keeps layers on a disk."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgellm.engine import GgufHeader, check_gguf, cut
from edgellm.engine.gguf.shard import check_cuttable
from edgellm.errors import LayersMissing
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.placement.split import ranges
from edgellm.storage import fingerprint
from edgellm.storage.layers.derived_pieces import together
from edgellm.storage.layers.store import LayerStore


@dataclass(frozen=True, slots=True)
class CutPoints:
    """The layers with which a stage may begin, and those with which it may end."""

    begins: frozenset[int]
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class Loadable:
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

    def pieces(self, model: str, layers: LayerRange) -> Sequence[Loadable]:
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

    def pieces(self, model: str, layers: LayerRange) -> Sequence[Loadable]:
        found: list[Loadable] = []
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
    as far as the store's limit allows. Small layers go together (`edgellm.storage.layers.derived_pieces`)."""

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

    def _piece(self, layers: LayerRange) -> Loadable:
        found = LayerRange(layers.start, together(layers.start, layers.last, self._size) + 1)
        at_an_end = found.start == 0 or found.stop == self.n_layers
        return Loadable(found, int(len(found) * self._size) + at_an_end * self._ends)

    def held(self, model: str) -> frozenset[int]:
        return frozenset(range(self.n_layers)) if model == self.model else frozenset()

    def bounds(self, model: str) -> CutPoints:
        return CutPoints(self.held(model), self.held(model))

    def pieces(self, model: str, layers: LayerRange) -> Sequence[Loadable]:
        found: list[Loadable] = []
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

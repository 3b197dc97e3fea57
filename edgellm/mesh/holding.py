"""Where a worker's layers lie: the seam between the mesh and whatever keeps layers on a device's disk."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgellm.engine import check_gguf, cut
from edgellm.engine.shard import check_cuttable
from edgellm.errors import LayersMissing
from edgellm.mesh.split import ranges
from edgellm.store import fingerprint
from edgellm.store.layers import LayerStore
from edgellm.store.made import together


@dataclass(frozen=True, slots=True)
class Bounds:
    """The layers with which a stage may begin, and those with which it may end."""

    begins: frozenset[int]
    ends: frozenset[int]


class Layers(Protocol):
    """Layers of models, in a file each (`engine.cut` of one layer), or several in a row in one: the first carries the
    embedding and the tokenizer, the last one norm and head. Models are known by the SHA-256 of their whole file, in
    hex."""

    def find(self, model: str, layer: int, last: int) -> Path | None:
        """A file that begins with `layer`, counted from 0, and ends with `last` or before it, wherever that suits; None
        where it is not here, or not whole. From now on nobody removes it, until `tidy` says that it is not loaded."""
        ...

    def held(self, model: str) -> frozenset[int]:
        """The layers that are here."""
        ...

    def bounds(self, model: str) -> Bounds:
        """Where a stage may begin and end, so that no piece has to be cut in two."""
        ...

    def tidy(self, loaded: Collection[Path]) -> None:
        """Lets go of the files that were found and are not loaded, or no longer."""
        ...


class InUse:
    """Files that nobody removes because they are loaded. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Path, ExitStack] = {}

    def keep(self, using: AbstractContextManager[Path]) -> Path:
        """The file that `using` shows, which it keeps until `tidy`. Raises what it raises."""
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
    """Layers that are in one place or another; of a model at most one of them has pieces of several layers that it
    cannot cut."""

    def __init__(self, *places: Layers) -> None:
        self._places = places

    def find(self, model: str, layer: int, last: int) -> Path | None:
        return next((path for place in self._places if (path := place.find(model, layer, last)) is not None), None)

    def held(self, model: str) -> frozenset[int]:
        return frozenset().union(*(place.held(model) for place in self._places))

    def bounds(self, model: str) -> Bounds:
        every = [place.bounds(model) for place in self._places]
        return Bounds(
            frozenset().union(*(one.begins for one in every)), frozenset().union(*(one.ends for one in every))
        )

    def tidy(self, loaded: Collection[Path]) -> None:
        for place in self._places:
            place.tidy(loaded)


class WholeModel:
    """A model file of this device, of which pieces are cut when they are asked for, and kept in a store of layers for
    the next time, as far as its limit allows. Small layers go together (`edgellm.store.made`)."""

    def __init__(self, path: Path, store: LayerStore | None = None) -> None:
        """Without a `store`, the user's own.

        Raises ModelNotFound, ModelCorrupt or ModelUnsupported where it cannot be cut, and OSError where it cannot be
        read."""
        self.path = path
        header = check_gguf(path)
        self.layers = check_cuttable(header)
        self.model = fingerprint(path)
        blocks = sum(tensor.nbytes for tensor in header.tensors if tensor.name.startswith("blk."))
        self._size = blocks / self.layers
        self._ends = sum(tensor.nbytes for tensor in header.tensors if not tensor.name.startswith("blk."))
        self._store, self._used = store or LayerStore(), InUse()

    def find(self, model: str, layer: int, last: int) -> Path | None:
        if model != self.model or not 0 <= layer <= last < self.layers:
            return None
        end = together(layer, last, self._size)
        head = end == self.layers - 1
        size = int((end - layer + 1) * self._size) + (self._ends if layer == 0 or head else 0)

        def make(path: Path) -> None:
            cut(self.path, path, layer, end, head=head)

        return self._used.keep(self._store.made.using(model, layer, end, size, make))

    def held(self, model: str) -> frozenset[int]:
        return frozenset(range(self.layers)) if model == self.model else frozenset()

    def bounds(self, model: str) -> Bounds:
        return Bounds(self.held(model), self.held(model))

    def tidy(self, loaded: Collection[Path]) -> None:
        self._used.tidy(loaded)


def require(layers: Layers, model: str, first: int, last: int, name: str) -> None:
    """Raises LayersMissing where one of the layers `first` to `last` is not here."""
    missing = sorted(set(range(first, last + 1)) - layers.held(model))
    if missing:
        raise LayersMissing(
            f"Layer{'s' if len(missing) > 1 else ''} {ranges(missing)} of {name} {'are' if len(missing) > 1 else 'is'}"
            " not on this device.",
            "Bring them there first, or start the worker with the whole model: edgellm serve --role worker -m MODEL",
        )

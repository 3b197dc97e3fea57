"""The sources from which a stage gets its layers: a whole model, or pieces that were deployed to this device.

llama.cpp loads files as a whole, so a part of a model file is cut into pieces before it is loaded. They are kept in the
store of layers, as far as its limit allows, and found there the next time.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from edgellm.engine import GgufHeader, ModelFile, check_gguf
from edgellm.engine.gguf.cuttable import check_cuttable, cut_points
from edgellm.errors import LayersMissing
from edgellm.layer_range import LayerRange, chain, ranges
from edgellm.mesh.messages import StageSpec
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layer_pieces import LayerPiece, grid, grid_lines, known_pieces, pieces_of
from edgellm.storage.layer_store import LayerStore

_READ_MOST = 4  # times that another device may have the own file read


@dataclass(frozen=True, slots=True)
class LayerFile:
    """Consecutive layers of a model, in a file of about `size` bytes.

    `key` and `layers` identify its content: `key` is the SHA-256 of the file, or of the model file that it is cut from.
    `using` yields the path, and keeps the file from being removed until the `with` ends. It raises LayersMissing if the
    file is no longer there.
    """

    layers: LayerRange
    size: int
    key: str
    using: Callable[[], AbstractContextManager[Path]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of one model on this device: `held`, in files with these `keys`.

    Stages begin and end with `pieces`, none of which overlap; None if a stage may hold any layers. `files` returns the
    files that make up some layers, in order; none if they are not here, or not by themselves. `header` returns the
    header of the whole model, or of a part of it. `cut` returns the layers of each piece that was cut from the file of
    the whole model; None: nothing has to be cut.
    """

    held: frozenset[int]
    pieces: tuple[LayerRange, ...] | None
    keys: frozenset[str]
    files: Callable[[LayerRange], Sequence[LayerFile]]
    header: Callable[[], GgufHeader]
    cut: Callable[[], Collection[LayerRange]] | None = None


class LayerSource(Protocol):
    """Layers of models on this device."""

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> ModelLayers | None:
        """Return the layers of a model, by the fingerprint of the whole; None if none are here. Where only pieces are
        here, `pieces` may be used, which are of that very model."""
        ...


class SeveralSources:
    """The first of several sources that has layers of a model."""

    def __init__(self, *sources: LayerSource) -> None:
        self._sources = sources

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> ModelLayers | None:
        return next((found for source in self._sources if (found := source.open(model, pieces)) is not None), None)


class WholeModel:
    """A model file of this device, from which pieces are cut when a stage loads them. Thread-safe."""

    def __init__(self, file: ModelFile, store: LayerStore | None = None) -> None:
        """Check that the file can be cut. `store` defaults to the user's own. Raises ModelCorrupt, ModelUnsupported:
        the file cannot be cut; OSError: the file cannot be read."""
        header = file.header
        self._file, self.model, self.n_layers = file, fingerprint(file.path), check_cuttable(header)
        pieces = tuple(LayerRange(*ends) for ends in pairwise([*cut_points(header), self.n_layers]))
        self.layers = ModelLayers(
            frozenset(range(self.n_layers)), pieces if len(pieces) < self.n_layers else None, frozenset((self.model,)),
            self._files, lambda: header, self._cut,
        )  # fmt: skip
        self._lines, self._store, self._hashing = grid_lines(header), store or LayerStore(), threading.Lock()
        self._sizes, *others = header.sizes(self.n_layers)
        self._others = sum(others)

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> ModelLayers | None:  # noqa: ARG002
        return self.layers if model == self.model else None

    def _files(self, layers: LayerRange) -> Sequence[LayerFile]:
        return [
            LayerFile(one, self._size(one), self.model, partial(self._using, one))
            for one in grid(layers, self._lines)
            if one.stop <= self.n_layers
        ]

    def own_pieces(self, wanted: Collection[LayerRange] = ()) -> tuple[LayerPiece, ...]:
        """Return the pieces of this file whose hashes are known, and the pieces of the `wanted` layers, which may be
        hashed now.

        Layers are left out that the file lacks, or for which it would be read more than _READ_MOST times.
        """
        with self._hashing:  # several devices with the same pieces have them hashed once
            known, left, missing = known_pieces(self.model), _READ_MOST * self.n_layers, list[LayerRange]()
            for one in sorted(set(wanted) - {piece.layers for piece in known}):
                if 0 <= one.start < one.stop <= self.n_layers and len(one) <= left:
                    missing.append(one)
                    left -= len(one)
            return (*known, *pieces_of(self._file, missing).pieces) if missing else known

    def _cut(self) -> Collection[LayerRange]:
        return [piece.layers for piece in self._store.complete(known_pieces(self.model))]

    @contextmanager
    def _using(self, layers: LayerRange) -> Iterator[Path]:
        """Yield a piece's file, which is cut if it is not in the store."""
        with ExitStack() as held:
            path: Path | None = None
            while path is None:
                known = {piece.layers: piece for piece in known_pieces(self.model)}.get(layers)
                if known is None or self._store.find(known) is None:
                    known = self._store.cut(self._file, layers, self._size(layers))
                with suppress(LayersMissing):  # it has just been removed
                    path = held.enter_context(self._store.using(known))
            yield path

    def _size(self, layers: LayerRange) -> int:
        at_an_end = layers.start == 0 or layers.stop == self.n_layers
        return sum(self._sizes[layers.start : layers.stop]) + at_an_end * self._others


class StoredLayers:
    """The layers in a store. They are found by the hashes of their pieces, and not by the hash of a whole model."""

    def __init__(self, store: LayerStore) -> None:
        self.store = store

    def open(self, model: str, pieces: Collection[LayerPiece] = ()) -> ModelLayers | None:  # noqa: ARG002
        """Return the layers: plans use the first of the pieces that do not overlap, while a stage may use all."""
        here = {piece.layers: piece for piece in self.store.complete(pieces)}
        chosen, held = list[LayerRange](), set[int]()
        for layers in here:
            if held.isdisjoint(layers):
                chosen.append(layers)
                held.update(layers)

        def files(layers: LayerRange) -> Sequence[LayerFile]:
            found = [here[one] for one in chain(here, layers)]
            return [LayerFile(one.layers, one.size, one.sha256, partial(self.store.using, one)) for one in found]

        def header() -> GgufHeader:
            # The last piece gives the size of the vocabulary, while the first piece's header may list every token.
            with self.store.using(max(here.values(), key=lambda piece: piece.last)) as path:
                return check_gguf(path)

        split = tuple(sorted(chosen)) if any(len(layers) > 1 for layers in chosen) else None
        keys = frozenset(piece.sha256 for piece in here.values())
        return ModelLayers(frozenset(held), split, keys, files, header) if here else None


def require(source: LayerSource, work: StageSpec) -> tuple[ModelLayers, Sequence[LayerFile]]:
    """Return the layers of a stage's model, and the files that make up the stage. Raises LayersMissing: one of the
    stage's layers is not here, or not without others."""
    found = source.open(work.model, work.pieces)
    if found is not None and (files := found.files(work.layers)):
        return found, files
    missing = sorted(set(work.layers) - (frozenset[int]() if found is None else found.held))
    if found is None or missing:
        what, verb = (f"Layers {ranges(missing)}", "are") if len(missing) > 1 else (f"Layer {ranges(missing)}", "is")
        raise LayersMissing(
            f"{what} of {work.name} {verb} not on this device.",
            "Deploy them first, or start the worker with the whole model: edgellm serve --role worker -m MODEL",
        )
    pieces = ", ".join(map(str, found.pieces or ()))
    raise LayersMissing(
        f"Layers {work.layers} of {work.name} do not match the boundaries of the pieces on this device: {pieces}.",
        "Deploy these layers with edgellm mesh deploy, or split the model at the boundaries of pieces.",
    )

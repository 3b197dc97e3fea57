"""Layers in memory: shared by all pipelines that use them, warm for a while after, given back where room is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.engine import MemoryEstimate, Model, costs_of
from edgellm.errors import LayersMissing, MemoryShort
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import MOST_ROWS, StageSpec
from edgellm.mesh.runtime.layer_sources import Layers

KEEP_SECONDS = 300.0
_PATIENCE = 2.0  # seconds: the stage that this one comes after may be about to give its memory back


@dataclass(slots=True)
class _Kept:
    """A piece that is loaded, or being loaded by somebody."""

    size: int
    users: int = 0
    model: Model | None = None
    used: float = 0.0
    there: threading.Event = field(default_factory=threading.Event)
    trouble: BaseException | None = None


class Lease:
    """Memory that is set aside, until it is given back."""

    def __init__(self, shelf: Shelf, size: int) -> None:
        self._shelf, self.size = shelf, size

    def close(self) -> None:
        """Gives it back, once."""
        size, self.size = self.size, 0
        self._shelf.release(size)


def beside(costs: MemoryEstimate, work: StageSpec, pieces: Sequence[LayerRange]) -> int:
    """Bytes that a stage takes beside the weights of its pieces: caches, and what each block computes a batch in."""
    size = costs.cache(len(work.layers), work.context, work.sessions)
    for piece in pieces:
        ends = piece.start == 0 or piece.stop == work.n_layers
        size += costs.batch(len(piece), work.context, MOST_ROWS + 1, ends=ends)
    return size


class Shelf:
    """Weights of single layers. Several threads may load at once; each layer is loaded once."""

    def __init__(
        self,
        layers: Layers,
        *,
        memory: int | None = None,
        keep: float = KEEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: bytes that weights, caches and batches may take in all, None for no limit. `keep`: seconds that
        weights stay when nobody uses them."""
        self.layers, self.memory, self.keep = layers, memory, keep
        self._clock = clock
        self._kept: dict[tuple[str, int, Path], _Kept] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._reserved = 0  # bytes of caches, and of what batches are computed in
        self._looking = 0  # calls that look for a file, or have found one that is not on the shelf yet

    @property
    def size(self) -> int:
        """Bytes of weights that are in memory."""
        with self._lock:
            return sum(kept.size for kept in self._kept.values())

    def warm(self, model: str) -> frozenset[int]:
        """The layers of a model that are in memory."""
        with self._lock:
            return frozenset(
                layer + further
                for (one, layer, _), kept in self._kept.items()
                if one == model and kept.model is not None
                for further in range(kept.model.n_layer)
            )

    @property
    def left(self) -> int:
        """Bytes of its memory that no stage has reserved for its caches; 0 where it has no limit."""
        return 0 if self.memory is None else max(1, self.memory - self._reserved)

    def reserve(self, work: StageSpec) -> Lease:
        """Sets memory aside for what a stage needs beside its weights. Waits a moment where others use it.

        Raises:
            MemoryShort: with its weights, and what is in use, that is more than there is.
        """
        header = None if self.memory is None else self.layers.header(work.model)
        if self.memory is None or header is None:  # what is not here is said where it is to be loaded
            return Lease(self, 0)
        pieces, costs = self.layers.pieces(work.model, work.layers), costs_of(header)
        size = beside(costs, work, [piece.layers for piece in pieces])
        weights = sum(piece.size for piece in pieces)
        mine = {piece.layers.start for piece in pieces}
        until = time.monotonic() + _PATIENCE
        with self._freed:
            while weights + size + (used := self._in_use(work.model, mine)) > self.memory:
                alone = weights + size > self.memory
                if alone or not self._freed.wait(until - time.monotonic()):
                    replies = "one reply" if work.sessions == 1 else f"{work.sessions} replies"
                    raise MemoryShort(
                        f"Layers {work.layers} of {work.name} take {weights / 1e6:.0f} MB, and"
                        f" {size / 1e6:.0f} MB for {replies} of {work.context} tokens; of"
                        f" {self.memory / 1e6:.0f} MB for layers {used / 1e6:.0f} MB are in use.",
                        "Give this device fewer layers, a shorter context, or more memory with --memory.",
                    )
            self._reserved += size
        return Lease(self, size)

    def _in_use(self, model: str, but: Collection[int]) -> int:
        """Bytes that stages use: of weights those but for the pieces of a model that begin with these layers."""
        weights = (
            kept.size for (one, layer, _), kept in self._kept.items()
            if kept.users and not (one == model and layer in but)
        )  # fmt: skip
        return self._reserved + sum(weights)

    def release(self, size: int) -> None:
        """What was reserved is free again."""
        with self._freed:
            self._reserved -= size
            self._freed.notify_all()

    def take(
        self, model: str, layers: LayerRange, progress: Callable[[float], None] | None = None
    ) -> Model:  # fmt: skip
        """A piece that begins with the first of `layers`, and ends with the last of them or before it, loaded unless it
        is there; to be given back with `give`.

        Raises:
            LayersMissing: it is not on this device.
            MemoryShort: what is in use leaves no room for it.
            ModelCorrupt, ModelUnsupported: its file cannot be loaded.
        """
        with self._finding():
            layer = layers.start
            path = self.layers.find(model, layers)
            if path is None:
                raise LayersMissing(f"Layer {layer + 1} is not on this device.", "Bring it there first.")
            kept, mine = self._claim((model, layer, path))
        if mine:
            try:
                kept.model = Model.load(path, progress=progress)
            except BaseException as error:
                kept.trouble = error
                with self._lock:
                    self._kept.pop((model, layer, path), None)
                raise
            finally:
                kept.there.set()
        kept.there.wait()
        if kept.trouble is not None or kept.model is None:
            raise kept.trouble or LayersMissing(f"Layer {layer + 1} could not be loaded.", "Ask again.")
        return kept.model

    def give(self, model: Model) -> None:
        """A piece that was taken is no longer used."""
        with self._freed:
            for kept in self._kept.values():
                if kept.model is model:
                    kept.users -= 1
                    kept.used = self._clock()
            self._freed.notify_all()

    def tidy(self, everything: bool = False) -> int:
        """Gives back what nobody has used for `keep` seconds, or all that nobody uses, and lets go of the files; how
        many pieces went."""
        now = self._clock()
        with self._lock:
            old = [
                key
                for key, kept in self._kept.items()
                if not kept.users and (everything or now - kept.used > self.keep)
            ]
            for key in old:
                self._drop(key)
            if not self._looking:  # else one that was just found is not loaded yet
                self.layers.tidy({path for _, _, path in self._kept})
        return len(old)

    @contextmanager
    def _finding(self) -> Iterator[None]:
        with self._lock:
            self._looking += 1
        try:
            yield
        finally:
            with self._lock:
                self._looking -= 1

    def _claim(self, key: tuple[str, int, Path]) -> tuple[_Kept, bool]:
        """The place of a piece, and whether the caller is the one to load it."""
        with self._lock:
            kept = self._kept.get(key)
            mine = kept is None
            if kept is None:
                size = key[2].stat().st_size
                self._make_room(size, key[1])
                kept = self._kept[key] = _Kept(size)
            kept.users += 1
            return kept, mine

    def _make_room(self, size: int, layer: int) -> None:
        """Gives back the least recently used layers, as far as need be."""
        if self.memory is None:
            return
        taken = self._reserved + sum(kept.size for kept in self._kept.values())
        idle = sorted((kept.used, key) for key, kept in self._kept.items() if not kept.users)
        while taken + size > self.memory and idle:
            key = idle.pop(0)[1]
            taken -= self._kept[key].size
            self._drop(key)
        if taken + size > self.memory:
            raise MemoryShort(
                f"Layer {layer + 1} takes {size / 1e6:.0f} MB, and of {self.memory / 1e6:.0f} MB for layers"
                f" {taken / 1e6:.0f} MB are in use, {self._reserved / 1e6:.0f} MB of them for caches.",
                "Give this device fewer layers, or more memory with --memory.",
            )

    def _drop(self, key: tuple[str, int, Path]) -> None:
        kept = self._kept.pop(key)
        if kept.model is not None:
            kept.model.close()

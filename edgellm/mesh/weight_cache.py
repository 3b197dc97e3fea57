"""Layers in memory: shared by all pipelines that use them, kept warm for a while after, evicted to make room."""

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
from edgellm.mesh.layer_sources import Layers
from edgellm.mesh.messages import MOST_ROWS, StageSpec

KEEP_SECONDS = 300.0
_PATIENCE = 2.0  # seconds: the stage that this one replaces may be about to release its memory


@dataclass(slots=True)
class _Kept:
    """A piece that is loaded, or being loaded by some thread."""

    size: int
    users: int = 0
    model: Model | None = None
    used: float = 0.0
    there: threading.Event = field(default_factory=threading.Event)
    trouble: BaseException | None = None


class MemoryReservation:
    """Memory that is reserved until the lease is closed."""

    def __init__(self, shelf: WeightCache, size: int) -> None:
        self._shelf, self.size = shelf, size

    def close(self) -> None:
        """Release the memory; a second call does nothing."""
        size, self.size = self.size, 0
        self._shelf.release(size)


def beside(costs: MemoryEstimate, work: StageSpec, pieces: Sequence[LayerRange]) -> int:
    """Return the bytes that a stage takes beside the weights of its pieces: caches, and each block's batch buffers."""
    size = costs.cache(len(work.layers), work.context, work.sessions)
    for piece in pieces:
        ends = piece.start == 0 or piece.stop == work.n_layers
        size += costs.batch(len(piece), work.context, MOST_ROWS + 1, ends=ends)
    return size


class WeightCache:
    """Weights of single layers. Several threads may load at once; each layer is loaded once."""

    def __init__(
        self,
        layers: Layers,
        *,
        memory: int | None = None,
        keep: float = KEEP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limit weights, caches and batches to `memory` bytes in all (None: no limit); keep weights that no stage uses
        for `keep` seconds."""
        self.layers, self.memory, self.keep = layers, memory, keep
        self._clock = clock
        self._kept: dict[tuple[str, int, Path], _Kept] = {}
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._reserved = 0  # bytes of caches and batch buffers
        self._looking = 0  # calls that look for a file, or have found a file that is not on the shelf yet

    @property
    def size(self) -> int:
        """Bytes of weights that are in memory."""
        with self._lock:
            return sum(kept.size for kept in self._kept.values())

    def warm(self, model: str) -> frozenset[int]:
        """Return the layers of a model that are in memory."""
        with self._lock:
            return frozenset(
                layer + further
                for (one, layer, _), kept in self._kept.items()
                if one == model and kept.model is not None
                for further in range(kept.model.n_layer)
            )

    @property
    def left(self) -> int:
        """Bytes of the shelf's memory that no stage has reserved for caches and batches; 0 if there is no limit."""
        return 0 if self.memory is None else max(1, self.memory - self._reserved)

    def reserve(self, work: StageSpec) -> MemoryReservation:
        """Reserve the memory that a stage needs beside its weights. Wait a moment where other stages use it.

        Raises:
            MemoryShort: the stage does not fit, with its weights, beside what is in use.
        """
        header = None if self.memory is None else self.layers.header(work.model)
        if self.memory is None or header is None:  # missing layers are reported when they are to be loaded
            return MemoryReservation(self, 0)
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
        return MemoryReservation(self, size)

    def _in_use(self, model: str, but: Collection[int]) -> int:
        """Return the bytes that stages use, without the weights of the pieces of `model` that begin with the layers
        `but`."""
        weights = (
            kept.size for (one, layer, _), kept in self._kept.items()
            if kept.users and not (one == model and layer in but)
        )  # fmt: skip
        return self._reserved + sum(weights)

    def release(self, size: int) -> None:
        """Give back `size` reserved bytes."""
        with self._freed:
            self._reserved -= size
            self._freed.notify_all()

    def take(
        self, model: str, layers: LayerRange, progress: Callable[[float], None] | None = None
    ) -> Model:  # fmt: skip
        """Return a piece that begins with the first of `layers`, and ends with the last of them or before it. Load it
        if it is not in memory; the caller gives it back with `give`.

        Raises:
            LayersMissing: the piece is not on this device.
            MemoryShort: what is in use leaves no room for the piece.
            ModelCorrupt, ModelUnsupported: the piece's file cannot be loaded.
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
        """Give back a piece got from `take`."""
        with self._freed:
            for kept in self._kept.values():
                if kept.model is model:
                    kept.users -= 1
                    kept.used = self._clock()
            self._freed.notify_all()

    def tidy(self, everything: bool = False) -> int:
        """Unload the pieces that have been unused for `keep` seconds, or all unused ones if `everything`, and release
        their files; return how many pieces were unloaded."""
        now = self._clock()
        with self._lock:
            old = [
                key
                for key, kept in self._kept.items()
                if not kept.users and (everything or now - kept.used > self.keep)
            ]
            for key in old:
                self._drop(key)
            if not self._looking:  # else a file that was just found may not be loaded yet
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
        """Return the entry of a piece, counted as used once more, and whether the caller has to load it."""
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
        """Unload the least recently used pieces until `size` more bytes fit."""
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

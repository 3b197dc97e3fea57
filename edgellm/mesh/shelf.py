"""Layers in memory: shared by all pipelines that use them, warm for a while after, given back where room is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.engine import Model
from edgellm.errors import LayersMissing, MemoryShort
from edgellm.mesh.holding import Layers

KEEP_SECONDS = 300.0


@dataclass(slots=True)
class _Kept:
    """A piece that is loaded, or being loaded by somebody."""

    size: int
    users: int = 0
    model: Model | None = None
    used: float = 0.0
    there: threading.Event = field(default_factory=threading.Event)
    trouble: BaseException | None = None


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
        """`memory`: bytes that weights may take in all, None for no limit. `keep`: seconds that they stay when nobody
        uses them."""
        self.layers, self.memory, self.keep = layers, memory, keep
        self._clock = clock
        self._kept: dict[tuple[str, int, Path], _Kept] = {}
        self._lock = threading.Lock()
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

    def take(
        self, model: str, layer: int, last: int, progress: Callable[[float], None] | None = None
    ) -> Model:  # fmt: skip
        """A piece that begins with `layer` and ends with `last` or before it, loaded unless it is there; to be given
        back with `give`.

        Raises:
            LayersMissing: it is not on this device.
            MemoryShort: what is in use leaves no room for it.
            ModelCorrupt, ModelUnsupported: its file cannot be loaded.
        """
        with self._finding():
            path = self.layers.find(model, layer, last)
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
        with self._lock:
            for kept in self._kept.values():
                if kept.model is model:
                    kept.users -= 1
                    kept.used = self._clock()

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
        taken = sum(kept.size for kept in self._kept.values())
        idle = sorted((kept.used, key) for key, kept in self._kept.items() if not kept.users)
        while taken + size > self.memory and idle:
            key = idle.pop(0)[1]
            taken -= self._kept[key].size
            self._drop(key)
        if taken + size > self.memory:
            raise MemoryShort(
                f"Layer {layer + 1} takes {size / 1e6:.0f} MB, and of {self.memory / 1e6:.0f} MB for weights"
                f" {taken / 1e6:.0f} MB are in use.",
                "Give this device fewer layers, or more memory with --memory.",
            )

    def _drop(self, key: tuple[str, int, Path]) -> None:
        kept = self._kept.pop(key)
        if kept.model is not None:
            kept.model.close()

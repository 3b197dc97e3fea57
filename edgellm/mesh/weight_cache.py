"""Layers in memory: shared by all pipelines that use them, kept warm for a while after, evicted to make room; and the
processor or graphics cards that compute them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from edgellm import system
from edgellm.engine import Model
from edgellm.engine.hardware import ALL_LAYERS, ON_PROCESSOR, ComputeDevice, Hardware, offload_devices
from edgellm.engine.memory_fit import spare_memory
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption, MemoryShort
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_costs import MemoryEstimate, costs_of
from edgellm.mesh.layer_sources import LayerFile, LayerSource, ModelLayers
from edgellm.mesh.messages import MAX_ROWS, StageSpec

_WAIT_SECONDS = 2.0  # wait for memory: a replaced stage may be about to release it


def free_memory() -> int:
    """Return the bytes that are free for layers on the processor, less a tenth for other programs."""
    return system.available_memory()[0] * 9 // 10


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """A device's unit for layers: the graphics cards `name`, such as CUDA0 or CUDA0/CUDA1, or without a name the
    processor; and the `reason`. Models are loaded there as `hardware` says."""

    hardware: Hardware = ON_PROCESSOR
    name: str = ""
    reason: str = ""

    @classmethod
    def choose(cls, hardware: Hardware) -> Self:
        """Return the unit that `hardware` asks for: by default the graphics cards, if there are any. Raises
        InvalidOption: there is no such card; or some layers would be on cards and others not, while a plan knows one
        speed for all of them."""
        if hardware.gpu_layers not in (None, 0, ALL_LAYERS):
            raise InvalidOption(
                f"--gpu-layers is {hardware.gpu_layers}, but a device computes all its layers of a mesh in one place.",
                "Give auto, all or 0. For both, run two workers here, one of them with --gpu-layers 0.",
            )
        if hardware.gpu_layers == 0:
            return cls(hardware, "", "--gpu-layers is 0")
        cards = offload_devices(hardware.devices)
        if not cards:
            if hardware.gpu_layers == ALL_LAYERS:
                raise InvalidOption(
                    "--gpu-layers is all, but llama.cpp finds no graphics card.",
                    "Leave it out; edgellm doctor tells how llama.cpp is compiled for a graphics card.",
                )
            return cls(replace(hardware, gpu_layers=0), "", "llama.cpp finds no graphics card that it can use")
        if not hardware.devices:  # llama.cpp leaves out integrated cards beside others
            cards = [card for card in cards if card.kind == "gpu"] or cards[:1]
        reason = "--device names it" if hardware.devices else "graphics cards compute unless --gpu-layers is 0"
        names = tuple(card.name for card in cards)
        return cls(replace(hardware, gpu_layers=ALL_LAYERS, devices=names), "/".join(names), reason)

    @property
    def description(self) -> str:
        """The name of the processor, or the names of the cards, by their makers."""
        return " and ".join(card.description for card in self._cards())[:100] if self.name else system.processor()

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the computing devices in llama.cpp."""
        return self.hardware.devices if self.name else ("CPU",)

    def available(self) -> int:
        """Return the bytes that are free for layers."""
        free, cards = free_memory(), self._cards()
        if not cards or not all(card.total for card in cards):  # cards without a size do not report memory
            return free
        spare = sum(map(spare_memory, cards))
        shared = any(card.kind == "igpu" for card in cards)  # its memory is the machine's
        return min(free, spare) if shared else spare

    def _cards(self) -> Sequence[ComputeDevice]:
        return offload_devices(self.hardware.devices) if self.name else ()


@dataclass(slots=True)
class _Entry:
    """A file that is loaded, or being loaded by some thread; `open` keeps it from being removed."""

    used: float = 0.0
    model: Future[Model] = field(default_factory=Future)
    open: ExitStack = field(default_factory=ExitStack)


def overhead(costs: MemoryEstimate, work: StageSpec, pieces: Iterable[LayerRange]) -> int:
    """Return the bytes that a stage takes beside the weights of its pieces: caches, and each block's batch buffers."""
    size = costs.cache(len(work.layers), work.context, work.sessions)
    for piece in pieces:
        ends = piece.start == 0 or piece.stop == work.n_layers
        size += costs.batch(len(piece), work.context, MAX_ROWS + 1, ends=ends)
    return size


class WeightCache:
    """Weights of layers. Several threads may load at once; each file is loaded once."""

    def __init__(
        self,
        layers: LayerSource,
        *,
        unit: ComputeUnit = ComputeUnit(),
        memory: int | None = None,
        keep: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load layers for the `unit` that computes them. Limit weights, caches and batches to `memory` bytes in all
        (None: no limit); keep weights that no reservation names for `keep` seconds."""
        self.layers, self.unit, self.memory, self.keep = layers, unit, memory, keep
        self._clock = clock
        self._entries: dict[LayerFile, _Entry] = {}
        self._reservations = Counter[LayerFile]()  # how many name each file
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._reserved = 0  # bytes of caches and batch buffers

    @property
    def size(self) -> int:
        """Bytes of weights that are in memory."""
        with self._lock:
            return sum(file.size for file in self._entries)

    def warm(self, model: ModelLayers) -> frozenset[int]:
        """Return the layers of a model that are in memory."""
        with self._lock:
            loaded = [file for file, entry in self._entries.items() if entry.model.done()]
        return frozenset(layer for file in loaded if file.key in model.keys for layer in file.layers)

    def available(self) -> int:
        """Return the bytes for weights, loaded weights included, and further caches."""
        free = self.unit.available() + self.size
        return max(1, free if self.memory is None else min(free, self.memory - self._reserved))

    def reserve(self, work: StageSpec, model: ModelLayers, files: Sequence[LayerFile]) -> ExitStack:
        """Reserve memory for a stage of these files, whose weights stay once they are loaded, until the result is
        closed. Wait a moment if other stages use it. Raises MemoryShort: the stage does not fit, with its weights,
        beside what is in use."""
        size = overhead(costs_of(model.header(), self.unit.hardware.cache_type), work, [file.layers for file in files])
        weights = sum(file.size for file in files)
        replies = "one reply" if work.sessions == 1 else f"{work.sessions} replies"
        needed = (
            f"Layers {work.layers} of {work.name} take {weights / 1e6:.0f} MB, and {size / 1e6:.0f} MB for {replies} of"
            f" {work.context} tokens"
        )
        return self._reserve(size, inf if self.memory is None else self.memory, files, needed)

    def reserve_bytes(self, size: int, what: str, files: Sequence[LayerFile] = ()) -> ExitStack:
        """Reserve memory for `what`, which is no stage, until the result is closed; unused weights are unloaded for it.
        The weights of `files` stay meanwhile. Wait a moment if memory is in use. Raises MemoryShort: it does not fit
        beside what is in use."""
        if size > self.available():
            self.evict_unused(everything=True)
        return self._reserve(size, self.unit.available(), files, f"{what} takes {size / 1e6:.0f} MB here")

    def _reserve(self, size: int, most: float, files: Sequence[LayerFile], needed: str) -> ExitStack:
        """Reserve `size` bytes once they are left beside the weights of `files`; there are never more than `most`."""
        weights = sum(file.size for file in files)
        deadline = time.monotonic() + _WAIT_SECONDS
        with self._freed:
            while weights + size > (
                found := most if self.memory is None else min(most, self.memory - self._in_use(files))
            ):
                if weights + size > most or not self._freed.wait(deadline - time.monotonic()):
                    raise MemoryShort(
                        f"{needed}, and {max(0, found) / 1e6:.0f} MB are left.",
                        "Give this device fewer layers, a shorter context, or more memory with --memory.",
                    )
            self._reserved += size
            self._reservations.update(files)
        reservation = ExitStack()
        reservation.callback(self._release, size, files)
        return reservation

    def _in_use(self, excluded: Sequence[LayerFile]) -> int:
        """Return the bytes that are reserved, without the weights of the files `excluded`."""
        return self._reserved + sum(file.size for file in self._reservations if file not in excluded)

    def _release(self, size: int, files: Sequence[LayerFile]) -> None:
        with self._freed:
            self._reserved -= size
            self._reservations -= Counter(files)
            for file in self._entries.keys() & files:
                self._entries[file].used = self._clock()
            self._freed.notify_all()

    def acquire(self, file: LayerFile, progress: Callable[[float], None] | None = None) -> Model:
        """Return the layers of a file for which room is reserved, loaded if they are not in memory. Raises
        LayersMissing: the file is no longer on this device; ModelCorrupt, ModelUnsupported: it cannot be loaded;
        StoreFull, DiskFull, LayersRefused: it had to be cut, and there is no room."""
        with self._lock:
            entry = self._entries.get(file)
            mine = entry is None
            if entry is None:
                self._make_room(file)
                entry = self._entries[file] = _Entry()
        if mine:
            try:
                path = entry.open.enter_context(file.using())
                model = Model.load(path, LoadSpec(self.unit.hardware), progress=progress)
                entry.open.callback(model.close)
                entry.model.set_result(model)
            except BaseException as error:
                entry.open.close()
                with self._lock:
                    self._entries.pop(file, None)
                entry.model.set_exception(error)
                raise
        return entry.model.result()

    def evict_unused(self, everything: bool = False) -> int:
        """Unload the files that have been unused for `keep` seconds, or all unused ones if `everything`; return how
        many."""
        with self._lock:
            before = float("inf") if everything else self._clock() - self.keep
            old = [file for file in self._unused() if self._entries[file].used < before]
            for file in old:
                self._entries.pop(file).open.close()
        return len(old)

    def _unused(self) -> list[LayerFile]:
        """Return the files that no reservation names, the least recently used first."""
        return sorted(self._entries.keys() - self._reservations, key=lambda file: self._entries[file].used)

    def _make_room(self, file: LayerFile) -> None:
        """Unload the least recently used files until `file` fits."""
        for oldest in self._unused():
            used = self._reserved + sum(loaded.size for loaded in self._entries)
            if self.memory is None or used + file.size <= self.memory:
                return
            self._entries.pop(oldest).open.close()

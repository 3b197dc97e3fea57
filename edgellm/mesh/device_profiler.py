"""Measurement of this device: the speed of layers on the unit that computes them, and its memory.

Figures are stored with the time and the reason, and measured again on request, or when something relevant has changed.
"""

import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

from filelock import FileLock

from edgellm import system
from edgellm.engine import Model, ModelFile, cut
from edgellm.engine.cores import CpuWait, is_plausible
from edgellm.engine.gguf.synthetic_layers import Blocks, time_passes, write_random
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.errors import EdgeError, MeasureFailed
from edgellm.layer_range import LayerRange
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.measuring import DeviceFigures
from edgellm.rpc.protos import program_version
from edgellm.state import MONTH, from_json, read_cached, write_cached
from edgellm.storage.layer_pieces import grid, grid_lines
from edgellm.system import cache_dir

MAX_DOUBTFUL_AGE = 600.0
"""Seconds for which measurements on a busy machine are used."""
_LOADING = 2.0  # seconds of loading layers


def measure_device(
    blocks: Blocks,
    max_age: float = MONTH,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    folder: Path | None = None,
    unit: ComputeUnit = ComputeUnit(),
    memory: Callable[[], int] | None = None,
) -> DeviceFigures:
    """Return this device's figures for such layers, measured within `max_age` seconds or now. Memory is always current.

    `folder` is where layers lie: the disk that is read. `memory` returns the bytes for layers: by default the free
    bytes of the `unit`, which computes the layers. Raises MeasureFailed: the device cannot be
    measured."""
    free = (memory or unit.available)()
    stored, reason = _stored_figures(blocks, max_age, unit)
    if stored is None:
        root = folder or cache_dir() / "layers"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(root / "measuring.lock", mode=0o600):  # another process may measure the same
                stored, reason = _stored_figures(blocks, max_age, unit)
                if stored is None:
                    file = root / f"measuring-{blocks.key[:16]}.gguf"
                    stored = _measure(blocks, reason, on_progress, file, unit)
                    write_cached(_figures_path(blocks.key, unit), asdict(stored))
        except OSError as error:
            raise MeasureFailed(
                f"Nothing can be measured in {root}: {error.strerror or error}.", "Make room, or check permissions."
            ) from None
        except EdgeError as error:
            raise MeasureFailed(
                f"Layers of this model cannot be measured here: {error.what}", error.next_step
            ) from None
    return replace(stored, memory=free, unit_reason=unit.reason)


def _measure(
    blocks: Blocks, reason: str, on_progress: Callable[[str], None], file: Path, unit: ComputeUnit
) -> DeviceFigures:  # fmt: skip
    waiting = CpuWait()
    try:
        on_progress("writing layers of random weights")
        write_random(blocks, file)
        on_progress("loading them from disk")
        disk = _cold_load(file, blocks, unit.hardware)
        with _as_pieces(file, blocks) as paths:
            rows, seconds = time_passes(paths, blocks, unit.hardware, on_progress)
    finally:
        file.unlink(missing_ok=True)
    return DeviceFigures(
        int(time.time()), reason, blocks.key, rows, seconds, blocks.layer, disk, 0, unit.description, program_version(),
        waiting.share(), unit.name, unit.reason,
    )  # fmt: skip


@contextmanager
def _as_pieces(file: Path, blocks: Blocks) -> Iterator[list[Path]]:
    """Yield files with the layers of `file`, cut as for a stage: each takes a pass of its own."""
    lines = grid_lines(ModelFile.open(file).header)
    pieces = grid(LayerRange(0, blocks.layers), lines)
    paths = [file.with_name(f"{file.stem}-{layers.start}.gguf") for layers in pieces]
    try:
        for layers, path in zip(pieces, paths, strict=True):
            cut(file, path, layers.start, layers.last, head=False)
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _cold_load(file: Path, blocks: Blocks, hardware: Hardware) -> float:
    """Return the bytes/s at which layers load from the disk, ready to compute: one layer, then as many as load
    in some seconds, again and again. The first load does not count, as new layers are tried in a process of their own,
    and many disks that have rested are faster for a moment than they can sustain."""
    sample, count, rate = file.with_name(f"{file.stem}-some.gguf"), 1, 0.0
    try:
        for seconds in (0.0, _LOADING):
            count = max(1, min(blocks.layers, int(seconds * rate / blocks.layer)))
            cut(file, sample, 0, count - 1, head=False)
            loads, taken = -1, 0.0
            while loads < 1 or taken < 0.25 * seconds:
                with sample.open("rb", buffering=0) as opened:
                    system.drop_pages(opened.fileno())
                began = perf_counter()
                with Model.load(sample, LoadSpec(hardware)):
                    loads, taken = loads + 1, taken + (perf_counter() - began if loads >= 0 else 0.0)
            rate = loads * count * blocks.layer / taken
    finally:
        sample.unlink(missing_ok=True)
    return rate


def _figures_path(block: str, unit: ComputeUnit) -> Path:
    """Return the file of the figures; its name has the machine, because machines may share a home folder, and the
    unit and settings."""
    hardware = unit.hardware
    how = [hardware.threads or "all", unit.name, hardware.cache_type, hardware.flash_attn, *hardware.tensor_split]
    parts = (re.sub(r"[^A-Za-z0-9.]+", "_", str(part)) for part in how if part not in (None, ""))
    return cache_dir() / "figures" / f"{block[:16]}-{'-'.join(parts)}-{platform.node() or 'here'}.json"


def _stored_figures(blocks: Blocks, max_age: float, unit: ComputeUnit) -> tuple[DeviceFigures | None, str]:
    """Return the stored figures if they are good enough; else None, and the reason to measure."""
    path = _figures_path(blocks.key, unit)
    if (figures := read_cached(path, lambda found: from_json(DeviceFigures, found))) is None:
        return None, "never measured with such layers"
    age = time.time() - figures.taken
    if (figures.processor, figures.unit) != (unit.description, unit.name):
        return None, f"the processor was {figures.processor}"
    if figures.version != program_version():
        return None, f"measured by edgellm {figures.version}"
    if not 0 <= age <= max_age:
        return None, "asked for" if max_age <= 0 else f"{age / 86_400:.0f} days old"
    if figures.doubt and (age > MAX_DOUBTFUL_AGE or not is_plausible(figures.rows, figures.seconds)):
        return None, figures.doubt
    return figures, ""

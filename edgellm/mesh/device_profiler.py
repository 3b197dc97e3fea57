"""Measurement of this device: its memory, and the speed of layers on it.

Figures are stored with the time and the reason, and measured again on request, or when something relevant has changed.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from filelock import FileLock

from edgellm.engine import Model, cut
from edgellm.engine.gguf.synthetic_layers import Blocks, time_passes, write_random
from edgellm.engine.timing import CpuWait, is_plausible
from edgellm.errors import EdgeError, MeasureFailed, StateDamaged
from edgellm.places import cache_dir
from edgellm.rpc.layers.benchmark_service import DeviceFigures
from edgellm.rpc.versions import program_version
from edgellm.storage.device_speed import MAX_DOUBTFUL_AGE, cold_read, drop_page_cache, processor
from edgellm.storage.state import from_json, read_json, write_state

_SPARE = 0.1  # of what is free is left to others
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.max", "memory.current")


def free_memory(proc: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return the free bytes, and what bounds them: the machine's free memory, or this process's control groups."""
    free, reason = psutil.virtual_memory().available, "the machine's free memory, less a tenth"
    with suppress(OSError, ValueError):
        for line in proc.read_text(encoding="utf-8").splitlines():
            _number, controllers, place = line.split(":", 2)
            if controllers in ("", "memory"):
                root, names = (mounts / "memory", _V1) if controllers else (mounts, _V2)
                left = _cgroup_free(root, place, names)
                if left is not None and left < free:
                    free, reason = left, "the free memory of its control group, less a tenth"
    return int(max(0, free) * (1.0 - _SPARE)), reason


def _cgroup_free(root: Path, place: str, names: tuple[str, str]) -> int | None:
    """Return the least memory that a control group or one above it leaves; None without a limit."""
    least: int | None = None
    folder = root / place.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        with suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((group / name).read_text(encoding="utf-8")) for name in names)
            least = min(limit - used, least if least is not None else limit)
    return least


MAX_AGE = 30 * 86_400.0  # seconds; older figures are not used unasked
_AHEAD = 60.0  # seconds by which a clock may have been set back
_LOADING = 2.0  # seconds, for which layers are loaded
_LOADS = 2


def measure_device(
    blocks: Blocks,
    max_age: float = MAX_AGE,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    folder: Path | None = None,
    threads: int | None = None,
) -> DeviceFigures:
    """Return this device's figures for such layers, measured within `max_age` seconds or now. Memory is always current.

    `folder` is where layers lie: the disk that is read. `threads` as for `edgellm.engine.Context`.

    Raises:
        MeasureFailed: the device cannot be measured.
    """
    memory, bound = free_memory()
    stored, reason = _stored_figures(blocks, max_age, threads)
    if stored is None:
        root = folder or cache_dir() / "layers"
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(root / "measuring.lock", mode=0o600):  # others may have asked for the same
                stored, reason = _stored_figures(blocks, max_age, threads)
                stored = stored or _measure(
                    blocks, reason, on_progress, root / f"measuring-{blocks.key[:16]}.gguf", threads
                )
        except OSError as error:
            raise MeasureFailed(
                f"Nothing can be measured in {root}: {error.strerror or error}.",
                "Free some space there, or check its permissions.",
            ) from None
        except MeasureFailed:
            raise
        except EdgeError as error:
            raise MeasureFailed(
                f"Layers of this model cannot be measured here: {error.what}", error.next_step
            ) from None
        _store_figures(stored, threads)
    return replace(stored, memory=memory, memory_reason=bound)


def _measure(
    blocks: Blocks, reason: str, on_progress: Callable[[str], None], file: Path, threads: int | None
) -> DeviceFigures:  # fmt: skip
    waiting = CpuWait()
    try:
        on_progress("writing layers of random weights")
        write_random(blocks, file)
        on_progress("reading them from disk")
        disk, how = _cold_load(file, blocks, *cold_read(file))
        rows, seconds, taken = time_passes(file, blocks, threads, on_progress)
    finally:
        file.unlink(missing_ok=True)
    return DeviceFigures(
        int(time.time()), reason, blocks.key, rows, seconds, blocks.layer, disk, how, 0, "", taken, processor(),
        program_version(), waiting.share(),
    )  # fmt: skip


def _cold_load(file: Path, blocks: Blocks, rate: float, how: str) -> tuple[float, str]:
    """Return the bytes/s at which layers load from the disk, ready to compute, if a file is read at `rate`: llama.cpp
    may repack weights for the processor, and a slow processor then sets the limit."""
    sample = file.with_name(f"{file.stem}-some.gguf")
    count = max(1, min(blocks.layers, int(_LOADING * rate / blocks.layer)))
    try:
        cut(file, sample, 0, count - 1, head=False)
        loaded = 0.0
        for _ in range(_LOADS):
            drop_page_cache(sample)
            began = time.perf_counter()
            with Model.load(sample):
                loaded = max(loaded, count * blocks.layer / (time.perf_counter() - began))
    finally:
        sample.unlink(missing_ok=True)
    if loaded >= rate:
        return rate, how
    return loaded, f"{how}: {rate / 1e6:.0f} MB/s; {count} layers loaded, which is slower"


def _figures_path(block: str, threads: int | None) -> Path:
    """Return the file of the figures; it names the machine, too, because machines may share a home folder."""
    name = f"{block[:16]}-{threads or 'all'}-{platform.node() or 'here'}.json"
    return cache_dir() / "figures" / name


def _stored_figures(blocks: Blocks, max_age: float, threads: int | None) -> tuple[DeviceFigures | None, str]:
    """Return the stored figures if they are good enough; else None, and the reason to measure."""
    path = _figures_path(blocks.key, threads)
    try:
        figures = read_json(path, lambda found: from_json(DeviceFigures, found))
    except StateDamaged:
        figures = None
    if figures is None:
        return None, "never measured with such layers"
    age = time.time() - figures.taken
    if figures.processor != processor():
        return None, f"the processor was {figures.processor}"
    if figures.version != program_version():
        return None, f"measured by edgellm {figures.version}"
    if age > max_age or age < -_AHEAD:
        return None, "asked for" if max_age <= 0 else f"{age / 86_400:.0f} days old"
    if figures.doubt and (age > MAX_DOUBTFUL_AGE or not is_plausible(figures.rows, figures.seconds)):
        return None, figures.doubt
    return figures, ""


def _store_figures(figures: DeviceFigures, threads: int | None) -> None:
    """Store the figures. If that fails, they are measured again next time."""
    path = _figures_path(figures.block, threads)
    with suppress(OSError):
        write_state(path, json.dumps(asdict(figures)))

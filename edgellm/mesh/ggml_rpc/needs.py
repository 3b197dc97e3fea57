"""What a model takes beside its weights. llama.cpp reckons that in a process, which takes a second or two; so it is
kept."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc.model_process import ContextSizes, ModelProcess
from edgellm.engine.hardware import Hardware
from edgellm.engine.trial.probe import Probe
from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import read_json, write_state

MARGIN = 64 * 2**20
"""Bytes on each other device beside weights, caches and what it computes in."""


def beside_weights(
    file: ModelFile, sizes: ContextSizes, hardware: Hardware, process: ModelProcess | None = None
) -> tuple[int, int]:
    """Return the bytes of the model's caches, and those in which it computes: as kept, or as the `process` says, by
    default one that is started for it.

    Raises as `ModelProcess.beside_weights`.
    """
    path = _path(file, sizes, hardware)
    with suppress(StateDamaged):
        if (known := read_json(path, _needs)) is not None:
            return known
    asked = process or ModelProcess(file.path, 1, sizes, hardware)
    try:
        caches, compute = asked.beside_weights()
    finally:
        if process is None:
            asked.close()
    with suppress(OSError):  # it is reckoned again next time
        write_state(path, json.dumps({"caches": caches, "compute": compute}))
    return caches, compute


def _needs(found: Any) -> tuple[int, int]:
    return int(found["caches"]), int(found["compute"])


def _path(file: ModelFile, sizes: ContextSizes, hardware: Hardware) -> Path:
    """Return the place for a model's header, by the hash of what decides."""
    how = f"{Probe(file.paths, file.parts).key()} {sizes} {hardware.cache_type} {hardware.flash_attn}"
    return cache_dir() / "rpc" / f"{hashlib.sha256(how.encode()).hexdigest()[:32]}.json"

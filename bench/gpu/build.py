"""Setting up from nothing but Python and a compiler: edgellm's environment, and llama.cpp with its server.

Both are built beside each other. llama.cpp is built once for the graphics card, from the source that belongs to the
locked llama-cpp-python: edgellm uses those libraries, too (`LLAMA_CPP_LIB_PATH`), so both sides of a comparison run the
same code. This module imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness import llama_source

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CARDS = {
    "cuda": ("nvidia-smi", {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "native"}),
    "hip": ("rocminfo", {"GGML_HIP": "ON"}),
}
"""For each kind of card: a program that is there where it is, and llama.cpp's options for CMake."""


def kind_of_card() -> str:
    """Return which of `CARDS` is here, "" where none is."""
    return next((kind for kind, (sign, _) in CARDS.items() if shutil.which(sign)), "")


def set_up(folder: Path) -> Path:
    """Make the environment and build llama.cpp in `folder`, as far as they are not there; return llama-server.

    Raises:
        CalledProcessError: one of them fails; its output is in the folder.
    """
    kind = kind_of_card()
    place = folder / (kind or "processor")
    place.mkdir(parents=True, exist_ok=True)
    program = llama_source.binaries(place) / ("llama-server.exe" if os.name == "nt" else "llama-server")
    options = CARDS[kind][1] if kind else {}
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(_environment, folder / "environment.log")]
        if not program.exists():
            switches = {**options, "LLAMA_BUILD_SERVER": "ON", "GGML_RPC": "ON"}
            tasks.append(pool.submit(llama_source.build, place, ["llama-server"], switches, folder / "llama.log"))
        for task in tasks:
            task.result()
    return program


def _environment(log: Path) -> None:
    with log.open("ab") as output:
        subprocess.run([str(ROOT / "start"), "--version"], check=True, stdout=output, stderr=subprocess.STDOUT)

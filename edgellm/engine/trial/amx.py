"""Whether llama.cpp's code for Intel's matrix extension (AMX) works here: a child process tries it first.

Many builds end the process with SIGSEGV at the first decode on a processor that has AMX. GCC 12's
`_tile_loadconfig` tells its optimiser of 8 of the 64 bytes that it reads, so the configuration is never written whole;
and no thread but the first asks the kernel for the tiles (llama.cpp's issue 20824 and pull request 26954). Weights are
then loaded as the file lays them out, for the other instructions. `EDGELLM_AMX=on` and `off` override the trial.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

from edgellm import places
from edgellm.engine.build_info import features
from edgellm.engine.gguf.reader import check_gguf
from edgellm.engine.trial.probe import Probe, fatal_in_child, read_verdict, write_verdict
from edgellm.errors import EdgeError

INSTRUCTION = "AMX_INT8"
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""The options with which GCC and Clang compile llama.cpp without AMX."""


@functools.cache
def amx_failure() -> str:
    """Return why AMX must not be used, such as "it ends the process with SIGSEGV"; "" where it works or is not there.

    The first call with a build on a machine takes about a second; its verdict is kept for later processes.
    """
    if INSTRUCTION not in features().instructions:
        return ""
    if (chosen := os.environ.get("EDGELLM_AMX")) in ("on", "off"):
        return "" if chosen == "on" else "EDGELLM_AMX is off"
    kept = places.cache_dir() / "probed" / f"amx-{_build()}.json"
    fatal = read_verdict(kept)
    if fatal is None and (fatal := _tried()) is not None:
        write_verdict(kept, fatal)
    if fatal is None:
        return "it could not be tried"
    return f"it ends the process with {fatal}" if fatal else ""


def _tried() -> str | None:
    """Return the cause of the child's end, "" where it survived, None where AMX could not be tried."""
    model = next((path for folder in places.bundled_dirs() if (path := folder / "draft.gguf").is_file()), None)
    if model is None or not sys.executable:
        return None
    try:
        return fatal_in_child(Probe((model,), (check_gguf(model),)), EDGELLM_AMX="on")
    except EdgeError:  # it was ended from outside, or there is no memory now
        return None


def _build() -> str:
    """Return a hash of the compiled library and of the kernel that grants the tiles, 16 hex digits."""
    import llama_cpp

    digest = hashlib.sha256(f"{features().version} {platform.release()}".encode())
    for path in sorted(Path(llama_cpp.__file__).with_name("lib").glob("*ggml-cpu*")):
        found = path.stat()
        digest.update(f" {path} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]

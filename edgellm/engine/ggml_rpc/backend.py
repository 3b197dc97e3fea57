"""llama.cpp's RPC backend, where it is compiled in: devices of other processes, and the server of this one's.

It has no security of its own: a server does what whoever reaches its port asks for. And llama.cpp ends the process
whose server goes away. So edgellm serves on loopback only, and never in the process that answers users.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgellm.engine import library, native
from edgellm.engine.hardware import compute_devices
from edgellm.engine.native import ggml
from edgellm.errors import EngineFailed

HOST = "127.0.0.1"
PROGRAMS = ("rpc-server", "ggml-rpc-server")
"""Names of llama.cpp's own server, which does for a library without the backend."""


def how_to_compile() -> str:
    """Return the line that compiles llama.cpp with the backend."""
    return library.how_to_compile("-DGGML_RPC=on", "--with rpc")


def is_compiled_in() -> bool:
    """Return whether this process's llama.cpp has the RPC backend."""
    native.start()
    return "RPC" in native.backends()


def find_program() -> Path | None:
    """Return llama.cpp's own RPC server on the PATH, None without one."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return None if found is None else Path(found)


def add_server(port: int) -> tuple[str, ...]:
    """Connect to the RPC server at a port of this machine; return the names of its devices, which can hold layers from
    now on. llama.cpp ends this process if nothing answers there, and when the server goes away.

    Raises:
        EngineFailed: llama.cpp is compiled without the backend, or the server has no device.
    """
    require()
    known = {device.name for device in compute_devices()}
    add = function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    added = add(f"{HOST}:{port}".encode())
    if not added:
        raise EngineFailed(f"The RPC server at port {port} has no device.", "Start it with a device.")
    ggml.ggml_backend_register(added)
    return tuple(device.name for device in compute_devices() if device.name not in known)


def serve(port: int, threads: int, devices: Sequence[str], cache: Path | None = None) -> None:
    """Serve devices of this process, by their names, at a port of this machine; return only where that is impossible.
    Large weights are kept in the folder `cache`, by hash, so that they need not be sent again.

    Raises:
        EngineFailed: llama.cpp is compiled without the backend.
    """
    require()
    run = function(
        "ggml_backend_rpc_start_server", None,
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    )  # fmt: skip
    chosen = (ctypes.c_void_p * len(devices))(*(ggml.ggml_backend_dev_by_name(name.encode()) for name in devices))
    run(f"{HOST}:{port}".encode(), None if cache is None else f"{cache}/".encode(), threads, len(devices), chosen)


def require() -> None:
    """Raise EngineFailed where llama.cpp is compiled without the backend."""
    if not is_compiled_in():
        raise EngineFailed("llama.cpp is compiled without its RPC backend.", f"Compile it with: {how_to_compile()}")


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a C function of the backend with this result and these arguments, by the registry's own way to it."""
    address = ggml.ggml_backend_reg_get_proc_address(ggml.ggml_backend_reg_by_name(b"RPC"), name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)

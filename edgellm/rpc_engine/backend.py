"""llama.cpp's RPC: devices of other processes, and the server of this process's devices in a child.

It has no security of its own: a server obeys whoever reaches its port. And llama.cpp ends the process whose server goes
away. So edgellm serves on loopback only, and never in the process that answers users.
"""

import atexit
import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from edgellm.engine import library, native
from edgellm.engine.hardware import Hardware, compute_devices
from edgellm.engine.native import available_threads, ggml
from edgellm.errors import EngineFailed
from edgellm.isolation.child import POLL_SECONDS, Child, ChildFailed, ChildKind, Limits
from edgellm.isolation.serving import Functions, Report
from edgellm.system import be_killed_first, limit

HOST = "127.0.0.1"


def how_to_compile() -> str:
    """Return the line that compiles llama.cpp with the backend."""
    return library.how_to_compile("-DGGML_RPC=on", "--with rpc")


def is_compiled_in() -> bool:
    """Return whether this process's llama.cpp has the RPC backend."""
    native.start()
    return "RPC" in native.backends()


def add_server(port: int) -> tuple[str, ...]:
    """Connect to the RPC server at a port of this machine; return the names of its devices, which can hold layers from
    now on. llama.cpp ends this process if nothing answers there, and when the server goes away. Raises EngineFailed:
    llama.cpp is compiled without the backend, or the server has no device."""
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
    Large weights are kept in the folder `cache`, by hash, so that they need not be sent again."""
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


STARTING_SECONDS = 60.0
_BESIDE = 2**30  # bytes of a server's own memory beside its client's
_KIND = ChildKind("edgellm.rpc_engine.backend", "serves layers over RPC", keeps_words=True)


class RpcServer(Child):
    """An RPC server in a child process, for one client; it ends with this object, at the latest."""

    def __init__(
        self, hardware: Hardware, devices: Sequence[str] = ("CPU",), *, memory: int = 0, cache: Path | None = None
    ) -> None:
        """Start the process, and return when it listens. It computes on `devices`: the processor, with the threads of
        `hardware`, or graphics cards. Beside its own memory it gets `memory` bytes at most, if not 0, where the system
        can limit that. Large weights are kept in the folder `cache`. Raises EngineFailed: nothing here can serve, or
        the server does not start."""
        require()
        with socket.create_server((HOST, 0)) as free:
            self.port: int = free.getsockname()[1]
        super().__init__(_KIND, environment={**os.environ, "GGML_NO_BACKTRACE": "1"})
        try:
            self.call(
                "serve", Limits(), port=self.port, threads=hardware.threads or available_threads(),
                devices=list(devices), memory=memory, cache=str(cache or ""),
            )  # fmt: skip
            self._wait_until_listening()
        except ChildFailed as error:
            raise self._not_started(str(error)) from None
        except BaseException:
            self.close()
            raise

    def _wait_until_listening(self) -> None:
        """Wait for the child itself to listen at its port: another program may have taken it meanwhile."""
        deadline = time.monotonic() + STARTING_SECONDS
        while self.alive and time.monotonic() < deadline:
            if is_at(self.pid, self.port, listens=True):
                return
            time.sleep(POLL_SECONDS)
        raise self._not_started("it does not listen")

    def _not_started(self, why: str) -> EngineFailed:
        return EngineFailed(
            f"The RPC server did not start: {self.last_words() or why}.", "Try again; edgellm doctor says what serves."
        )


def is_at(process: int, port: int, *, listens: bool) -> bool:
    """Return whether a process has a connection from a port of this machine, or listens there."""
    with suppress(psutil.Error):
        found = psutil.Process(process).net_connections(kind="tcp")
        return any(at.laddr.port == port and (at.status == psutil.CONN_LISTEN) is listens for at in found)
    return False


def functions(_report: Report) -> Functions:
    """Return the function that serves, for the child."""
    return {"serve": _serve}


def _serve(_data: memoryview, port: int, threads: int, devices: list[str], memory: int, cache: str) -> None:
    """Begin to serve, until the process ends. `memory` and `cache` may be missing: 0 or ""."""
    be_killed_first()
    limit("RLIMIT_CORE", 0)
    if memory:
        limit("RLIMIT_DATA", memory + _BESIDE)
    atexit.register(os._exit, 0)  # llama.cpp still serves

    def serve_for_good() -> None:
        serve(port, threads, devices, Path(cache) if cache else None)
        os._exit(1)

    threading.Thread(target=serve_for_good, daemon=True).start()

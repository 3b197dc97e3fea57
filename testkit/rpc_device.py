"""A device whose memory is not the host's: llama.cpp's RPC backend, in a process of its own on loopback.

To llama.cpp it is as far away as a graphics card: weights, caches and results cross a socket. It is there if llama.cpp
was compiled with GGML_RPC, as `./start` does.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from edgellm.engine import native
from edgellm.engine.hardware import compute_devices

_SECONDS = 30.0


def available() -> bool:
    """Return whether llama.cpp has the backend here."""
    try:
        native.ggml("ggml-rpc")
    except OSError:
        return False
    return True


@contextmanager
def rpc_device() -> Iterator[str]:
    """Yield the name of a device that this process computes on until it ends; its server ends with the `with`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([sys.executable, "-m", "testkit.rpc_device", endpoint], stdout=subprocess.DEVNULL)
    try:
        _wait(endpoint, server)
        before = {device.name for device in compute_devices()}
        rpc, ggml = native.ggml("ggml-rpc"), native.ggml("ggml")
        rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
        rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
        ggml.ggml_backend_register.argtypes, ggml.ggml_backend_register.restype = [ctypes.c_void_p], None
        ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))
        yield next(device.name for device in compute_devices() if device.name not in before)
    finally:
        server.kill()
        server.wait()


def _wait(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    host, _, port = endpoint.partition(":")
    end = time.monotonic() + _SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"no device answers at {endpoint}")


def serve(endpoint: str) -> None:
    """Compute for whoever connects, on this machine's processor."""
    native.start()
    rpc, ggml = native.ggml("ggml-rpc"), native.ggml("ggml")
    ggml.ggml_backend_dev_get.argtypes, ggml.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    found = [ggml.ggml_backend_dev_get(at) for at in range(ggml.ggml_backend_dev_count())]
    devices = (ctypes.c_void_p * len(found))(*found)
    start = rpc.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start.restype = None
    start(endpoint.encode(), None, 1, len(found), ctypes.cast(devices, ctypes.c_void_p))


if __name__ == "__main__":
    serve(sys.argv[1])

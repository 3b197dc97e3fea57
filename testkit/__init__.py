"""Shared by tests and benchmarks: models, networks, processes and hostile input."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
_KEPT = ("EDGELLM_PAIR", "EDGELLM_PROBE")


def environment() -> dict[str, str]:
    """Return this process's environment for another machine's, without the user's own settings of edgellm; what they
    say of llama.cpp on this computer, and of the pair that answers, holds for both."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("EDGELLM_")}


def free_port() -> int:
    """Return a port of this machine's loopback on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def until_listening(port: int, process: subprocess.Popen[Any] | None = None, host: str = "127.0.0.1") -> None:
    """Wait until something listens at a port. Raise RuntimeError after a minute, or once the `process` has ended."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end and (process is None or process.poll() is None):
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"Nothing listens at port {port}.")

"""`edgellm serve` with the bundled pair, in a process and a home of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil

from edgellm.engine import to_f32
from edgellm.storage import resolve
from testkit import ROOT

PATIENCE = 120.0  # seconds until it answers


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the process and the address of a server of f32 copies of the pair, which are written to `folder`."""
    models = []
    for name in ("edgellm-draft", "edgellm-verifier"):
        models.append(folder / f"{name}.gguf")
        to_f32(resolve(name), models[-1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ("serve", "--draft", str(models[0]), "--verifier", str(models[1]), "--http-port", url.rpartition(":")[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", *words], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"EDGELLM_HOME": str(folder / "home")},
    )  # fmt: skip
    try:
        until, up = time.monotonic() + PATIENCE, False
        while not up:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("edgellm serve does not come up")
            time.sleep(0.2)
            with suppress(OSError), urlopen(f"{url}/health", timeout=5):
                up = True
        yield psutil.Process(process.pid), url
    finally:
        process.terminate()
        process.wait(30)

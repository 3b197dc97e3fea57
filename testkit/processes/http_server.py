"""`edgellm serve` in a process and a home of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil

from edgellm.storage.model_files import resolve
from testkit import ROOT, free_port
from testkit.gguf.changed import to_f32

PATIENCE = 120.0  # seconds until it answers


@contextmanager
def serving(home: Path, *words: str) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the process of `edgellm serve` with these words, and its address, once it answers there."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "serve", *words, "--http-port", str(port)], cwd=ROOT,
        env=os.environ | {"EDGELLM_HOME": str(home), "EDGELLM_INTERFACE": "127.0.0.1"},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until, up = time.monotonic() + PATIENCE, False
        while not up:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("edgellm serve does not come up")
            time.sleep(0.2)
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                up = True
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


@contextmanager
def serving_pair(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Serve f32 copies of the bundled pair, which are written to `folder`."""
    models = [folder / "draft.gguf", folder / "verifier.gguf"]
    for model in models:
        to_f32(resolve(f"edgellm-{model.stem}"), model)
    with serving(folder / "home", "--draft", str(models[0]), "--verifier", str(models[1])) as served:
        yield served

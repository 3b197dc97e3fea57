"""The processes of the RPC engine that this one has started; and one that computes on RPC servers.

The latter is `python -m tests.rpc_engine.processes MODEL PORT...`.

It waits for a line on standard input, connects, loads all layers of the model there and prints "loaded"; for every
further line of ids it decodes these and prints the next token. llama.cpp ends it when a server goes away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import numpy as np
import psutil

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.hardware import ALL_LAYERS, Hardware
from edgellm.engine.model import LoadSpec
from edgellm.rpc_engine import backend
from testkit import ROOT


class RpcClient:
    """Such a process, which waits to be told to begin."""

    def __init__(self, model: Path, *ports: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(model), *map(str, ports)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )  # fmt: skip

    def say(self, line: str) -> str:
        """Return the answer to a line, "" if the process has ended."""
        try:
            given = cast(IO[str], self.process.stdin)
            given.write(line + "\n")
            given.flush()
        except OSError:
            return ""
        return cast(IO[str], self.process.stdout).readline().strip()

    def next(self, ids: Sequence[int]) -> str:
        """Return the next token after a text, "" if the process has ended."""
        return self.say(" ".join(map(str, ids)))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def rpc_servers() -> list[psutil.Process]:
    """The RPC servers."""
    return _children("edgellm.rpc_engine.backend")


def model_processes() -> list[psutil.Process]:
    """The processes that hold a model over RPC servers."""
    return _children("edgellm.rpc_engine.process")


def _children(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


def main(model: str, *ports: str) -> None:
    sys.stdin.readline()
    names = tuple(name for port in ports for name in backend.add_server(int(port)))
    hardware = Hardware(gpu_layers=ALL_LAYERS, devices=names)
    with (
        Model.load(Path(model), LoadSpec(hardware), faults=()) as loaded,
        Context(loaded, ContextSpec(n_ctx=256)) as context,
    ):
        sys.stdout.write("loaded\n")
        sys.stdout.flush()
        for line in sys.stdin:
            context.clear()
            ids = np.array(line.split(), dtype=np.int32)
            sys.stdout.write(f"{int(context.decode(ids)[0].argmax())}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The RPC servers that a worker has started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def rpc_servers() -> list[psutil.Process]:
    """The RPC servers that this process has started."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "edgellm.engine.ggml_rpc.server" in child.cmdline():
                found.append(child)
    return found

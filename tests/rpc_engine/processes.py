"""The processes of the RPC engine that this one has started."""

from contextlib import suppress

import psutil


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

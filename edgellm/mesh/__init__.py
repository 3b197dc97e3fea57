"""A model over several devices. Two engines can spread it: by stages, each of which loads its own layers, or by
llama.cpp's RPC, for models whose layers cannot be cut."""

from importlib import import_module
from typing import Any, Literal

from edgellm.errors import EngineFailed

EngineName = Literal["stages", "rpc"]
ENGINES: dict[EngineName, str] = {
    "stages": "edgellm.mesh",
    "rpc": "edgellm.rpc_engine",
}  # fmt: skip
"""The package of each engine."""


def part_of(engine: EngineName, name: str) -> Any:
    """Return a module of an engine, imported now. Raise EngineFailed where edgellm is without the engine."""
    if engine not in ENGINES:
        raise EngineFailed(f"This edgellm is without the engine {engine!r}.", "Install the whole of edgellm.")
    return import_module(f"{ENGINES[engine]}.{name}")

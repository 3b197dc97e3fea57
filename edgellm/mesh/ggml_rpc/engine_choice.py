"""Which engine spreads a model over devices: our stages, or llama.cpp's RPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc import backend
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.errors import ModelUnsupported

EngineName = Literal["auto", "stages", "rpc"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and why it is taken."""

    engine: EngineName
    reason: str

    @property
    def over_rpc(self) -> bool:
        return self.engine == "rpc"


def choose_engine(file: ModelFile, asked: EngineName = "auto") -> EngineChoice:
    """Return the engine for a model: the one that was `asked` for; else stages if its layers can be cut.

    Raises:
        ModelUnsupported: its layers cannot be cut, and this llama.cpp has no RPC backend.
        EngineFailed: RPC was asked for, and this llama.cpp has no backend for it.
    """
    if asked != "auto":
        if asked == "rpc":
            backend.require()
        return EngineChoice(asked, "asked for")
    try:
        cut_points(file.header)
    except ModelUnsupported as error:
        if not backend.is_compiled_in():
            raise ModelUnsupported(
                error.what, f"Run it over llama.cpp's RPC instead, which this llama.cpp lacks: {backend.BUILD}."
            ) from None
        return EngineChoice("rpc", error.what)
    return EngineChoice("stages", "its layers can be cut: each device loads its own, and all do so at once")

"""Which models end with a layer that predicts further tokens, and whether it can be used; from the header alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from edgellm.engine import native
from edgellm.engine.gguf.reader import GgufHeader

ARCHITECTURES = frozenset(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "step35", "deepseek2", "deepseek32"))
"""Those whose MTP layer is tried by our tests. llama.cpp has eight others: bailingmoe3, cohere2moe, deepseek4, glm-dsa,
glm5-next, hy-v3, mimo2 and nemotron_h_moe."""
SEVERAL = frozenset(("step35",))
"""Those of which llama.cpp takes files that have several such layers; the first one is used."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")  # llama.cpp ends the process without them

# C++ functions that llama.cpp exports for its own server, by their names in ELF and Mach-O files
_SET = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET = "_Z26llama_get_embeddings_nextnP13llama_context"


@dataclass(frozen=True, slots=True)
class MtpSupport:
    """Whether a model's MTP layer can be used, and why not, or how."""

    usable: bool
    reason: str


def layers(header: GgufHeader) -> int:
    """Return how many layers at the end of a model predict further tokens; 0 for most models."""
    count = header.metadata.get(f"{header.architecture}.nextn_predict_layers", 0)
    return count if isinstance(count, int) else 0


def support(header: GgufHeader) -> MtpSupport:
    """Return whether the MTP layer of a model with this header can be used."""
    count, arch = layers(header), header.architecture
    if not count:
        return MtpSupport(False, "it has no layer that predicts further tokens (MTP)")
    if arch not in ARCHITECTURES:
        return MtpSupport(False, f"its layer that predicts further tokens (MTP) is not used: not tried with {arch}")
    if count > 1 and arch not in SEVERAL:
        return MtpSupport(False, f"llama.cpp computes one MTP layer of {arch}, and the file has {count}")
    total = header.metadata.get(f"{arch}.block_count")
    first = total - count if isinstance(total, int) else 0
    if missing := [name for name in _NEEDED if header.tensor(f"blk.{first}.{name}.weight") is None]:
        return MtpSupport(False, f"the file lacks blk.{first}.{missing[0]} of its MTP layer")
    if state_functions() is None:
        return MtpSupport(False, "this build of llama.cpp does not export the functions for MTP layers")
    return MtpSupport(True, "its last layer predicts further tokens (MTP): it drafts where that is faster")


@functools.cache
def state_functions() -> tuple[Any, Any] | None:
    """Return llama.cpp's functions that have a context keep its rows' states, and return their address; None where
    the library lacks them."""
    import ctypes

    library = native.llama()
    try:
        keep, states = getattr(library, _SET), getattr(library, _GET)
    except AttributeError:
        return None
    return (
        native.bind(keep, None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool),
        native.bind(states, ctypes.c_void_p, ctypes.c_void_p),
    )

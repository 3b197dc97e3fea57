"""Which models end with a layer that predicts further tokens, whether it can be used, and which files are nothing but
drafters for another model; from the header alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from edgellm.engine import native
from edgellm.engine.gguf.reader import GgufHeader, mtp_layers, text_layers

ARCHITECTURES = frozenset(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "step35", "deepseek2", "deepseek32"))
"""Those whose MTP layer is tried by our tests. llama.cpp has eight others: bailingmoe3, cohere2moe, deepseek4, glm-dsa,
glm5-next, hy-v3, mimo2 and nemotron_h_moe."""
SEVERAL = frozenset(("step35",))
"""Those of which llama.cpp takes files that have several such layers; the first one is used."""
STATES_OF_LAST_ROWS = frozenset(("qwen3next", "step35"))
"""Those whose graph of the MTP layer gives the states of rows with logits alone. Of the others llama.cpp can hand over
the states of all rows; asked for those with logits alone, it would copy the first rows instead."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")  # llama.cpp ends the process without them

# C++ functions that llama.cpp exports for its own server, by their names in ELF and Mach-O files
_SET = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET = "_Z26llama_get_embeddings_nextnP13llama_context"


_DRAFTERS = {
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "gemma4-assistant": "a drafter for Gemma 4 (assistant)",
}
"""Files that read the states of another model's layers while that one computes, by architecture."""


def drafter_file(header: GgufHeader) -> str:
    """Return what a file is that drafts for another model and writes no text by itself, such as "an EAGLE-3 head"; ""
    for a whole model."""
    if (kind := _DRAFTERS.get(header.architecture)) is not None:
        return kind
    trunk = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return "an MTP layer without the model that it belongs to" if mtp_layers(header) and not trunk else ""


@dataclass(frozen=True, slots=True)
class MtpSupport:
    """Whether a model's MTP layer can be used, and why not, or how."""

    usable: bool
    reason: str


def support(header: GgufHeader) -> MtpSupport:
    """Return whether the MTP layer of a model with this header can be used."""
    count, arch = mtp_layers(header), header.architecture
    if not count:
        return MtpSupport(False, "it has no layer that predicts further tokens (MTP)")
    if arch not in ARCHITECTURES:
        return MtpSupport(False, f"its layer that predicts further tokens (MTP) is not used: not tried with {arch}")
    if count > 1 and arch not in SEVERAL:
        return MtpSupport(False, f"llama.cpp computes one MTP layer of {arch}, and the file has {count}")
    first = text_layers(header)
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

"""Models that a speculator can draft for, and files that only draft for another model; from the header alone."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.engine.gguf.memory import mtp_layers, text_layers
from edgellm.engine.gguf.reader import GgufHeader
from edgellm.engine.speculators.states import StateFunctions
from edgellm.engine.trial.probe import EAGLE3

ARCHITECTURES = frozenset(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "step35", "deepseek2", "deepseek32"))
"""Architectures whose MTP layer our tests try. llama.cpp has eight more: bailingmoe3, cohere2moe, deepseek4, glm-dsa,
glm5-next, hy-v3, mimo2 and nemotron_h_moe."""
SEVERAL = frozenset(("step35",))
"""Architectures of which llama.cpp takes files with several MTP layers; the first layer is used."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")  # llama.cpp ends the process without them

_DRAFTERS = {
    EAGLE3: "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "gemma4-assistant": "a drafter for Gemma 4 (assistant)",
}
"""Files that read the states of another model's layers while that model computes, by architecture."""


def is_eagle3(header: GgufHeader) -> bool:
    """Return whether a file is an EAGLE-3 head."""
    return header.architecture == EAGLE3


def drafter_file(header: GgufHeader) -> str:
    """Return the kind of a file that only drafts for another model, such as "an EAGLE-3 head"; "" for a whole model."""
    if (kind := _DRAFTERS.get(header.architecture)) is not None:
        return kind
    trunk = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return "an MTP layer without the model that it belongs to" if mtp_layers(header) and not trunk else ""


@dataclass(frozen=True, slots=True)
class MtpSupport:
    """The answer whether a model's MTP layer can be used, and why not, or how."""

    usable: bool
    reason: str


def mtp_support(header: GgufHeader) -> MtpSupport:
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
    if StateFunctions.find() is None:
        return MtpSupport(False, "this build of llama.cpp does not export the functions for MTP layers")
    return MtpSupport(True, "its last layer predicts further tokens (MTP): it drafts where that is faster")

"""Files that only draft for another model, and the speculators, which are imported where a model has one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edgellm.engine.gguf.memory import mtp_layers
from edgellm.engine.gguf.reader import GgufHeader
from edgellm.errors import ModelUnsupported

MTP, EAGLE3 = "mtp", "eagle3"
"""The kinds of speculators: a model's layer that predicts further tokens, and a head in a file of its own. They are
also names of faults (`engine.trial.probe`) of a model from whose states such a speculator must not draft."""
SPECULATORS = {
    MTP: "edgellm.engine.speculators.mtp",
    EAGLE3: "edgellm.engine.speculators.eagle3",
}  # fmt: skip
"""The module of each kind of speculator. Without a kind's line, its files are refused."""

_DRAFTERS = {
    EAGLE3: "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "gemma4-assistant": "a drafter for Gemma 4 (assistant)",
}
"""Files that read the states of another model's layers while that model computes, by architecture."""


def speculator_module(kind: str) -> Any:
    """Return the module of a kind of speculator. Raise ModelUnsupported without one."""
    if kind not in SPECULATORS:
        raise ModelUnsupported(f"This edgellm cannot draft by {kind}.", "Leave it out.")
    return import_module(SPECULATORS[kind])


def is_eagle3(header: GgufHeader) -> bool:
    """Return whether a file is an EAGLE-3 head."""
    return header.architecture == EAGLE3


def drafter_file(header: GgufHeader) -> str:
    """Return the kind of a file that only drafts for another model, such as "an EAGLE-3 head"; "" for a whole model."""
    if (kind := _DRAFTERS.get(header.architecture)) is not None:
        return kind
    trunk = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return "an MTP layer without the model that it belongs to" if mtp_layers(header) and not trunk else ""


def mtp_obstacle(header: GgufHeader) -> str:
    """Return why the MTP layer of a model with this header cannot be used; "" if it can."""
    if not mtp_layers(header):
        return "it has no layer that predicts further tokens (MTP)"
    if MTP not in SPECULATORS:
        return "its layer that predicts further tokens (MTP) is not used"
    return str(speculator_module(MTP).unusable(header))

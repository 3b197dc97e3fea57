"""The costs of a GGUF for the devices that hold it, read from its header: the planner's record of a model."""

from __future__ import annotations

import re
from pathlib import Path

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.engine import Dimensions, check_gguf, dimensions
from edgellm.errors import ModelUnsupported

_BLOCK = re.compile(r"blk\.(\d+)\.")


def model_of(path: Path) -> ModelCosts:
    """Return the costs of a model file for the planner: the real bytes of its layers, as quantised in the file.

    Raises what `check_gguf` raises, and `ModelUnsupported` for a file that is not a transformer with layers.
    """
    header = check_gguf(path)
    shape, name = _shape(dimensions(header)), str(header.metadata.get("general.name") or path.stem)
    weights, embedding, head = [0.0] * shape.layers, 0.0, 0.0
    tied = True
    vocabulary = 0
    for tensor in header.tensors:
        if found := _BLOCK.match(tensor.name):
            if int(found[1]) < shape.layers:
                weights[int(found[1])] += tensor.nbytes
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
            tied &= tensor.name != "output.weight"
        else:
            embedding += tensor.nbytes
            if tensor.name == "token_embd.weight":
                vocabulary = tensor.shape[-1]
    if not all(weights):
        missing = weights.index(0.0)
        raise ModelUnsupported(f"{path} has no weights for its layer {missing}.", "Use a whole language model.")
    if tied:
        head += embedding
    cache = (shape.cache,) * shape.layers
    return ModelCosts(name, shape, tuple(weights), cache, embedding, head, tied, 2.0 * shape.d_model * vocabulary)


def _shape(known: Dimensions) -> TransformerShape:
    return TransformerShape(
        layers=known.layers, d_model=known.d_model, heads=known.heads, kv_heads=known.kv_heads, d_head=known.keys,
        d_ff=known.d_ff,
    )  # fmt: skip

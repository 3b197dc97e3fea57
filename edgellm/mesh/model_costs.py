"""The bytes and FLOPs of a GGUF's layers, read from its header: the planner's records of a model."""

from __future__ import annotations

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.engine import Dimensions, ModelFile, dimensions
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.errors import ModelUnsupported
from edgellm.storage.layers.manifest import grid_lines


def model_costs(file: ModelFile) -> ModelCosts:
    """Return the costs of a model file for the planner: the real bytes of its layers, as quantised in the file. Raises
    ModelUnsupported: it is not a transformer with layers, or they cannot be cut apart."""
    shape = shape_of(dimensions(file.header))
    weights, embedding, head = [0.0] * shape.layers, 0.0, 0.0
    tied = True
    vocabulary = 0
    for tensor in file.header.tensors:
        if (at := tensor.layer) is not None:
            if at < shape.layers:
                weights[at] += tensor.nbytes
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
            tied &= tensor.name != "output.weight"
        else:
            embedding += tensor.nbytes
            if tensor.name == "token_embd.weight":
                vocabulary = tensor.shape[-1]
    if not all(weights):
        missing = weights.index(0.0)
        raise ModelUnsupported(f"{file.path} has no weights for its layer {missing}.", "Use a complete language model.")
    if tied:
        head += embedding
    cache = (shape.cache,) * shape.layers
    return ModelCosts(
        file.name, shape, tuple(weights), cache, embedding, head, tied, 2.0 * shape.d_model * vocabulary,
        frozenset(cut_points(file.header)), frozenset(grid_lines(file.header)),
    )  # fmt: skip


def shape_of(known: Dimensions) -> TransformerShape:
    """Return the shape for the cost model of layers with these dimensions."""
    return TransformerShape(
        layers=known.layers, d_model=known.d_model, heads=known.heads, kv_heads=known.kv_heads, d_head=known.keys,
        d_ff=known.d_ff, bytes_per_activation=4.0,
    )  # fmt: skip

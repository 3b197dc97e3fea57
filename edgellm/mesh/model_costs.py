"""The bytes and FLOPs of a GGUF's layers, read from its header: the planner's records of a model."""

from __future__ import annotations

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.rpc_plan import RpcModelCosts
from edgellm.engine import Dimensions, ModelFile, dimensions
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.engine.gguf.memory import text_layers
from edgellm.engine.gguf.reader import GgufHeader
from edgellm.errors import ModelUnsupported
from edgellm.storage.layers.manifest import grid_lines

_EXPERTS = "_exps."  # part of the names of tensors with all experts of a layer
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def model_costs(file: ModelFile) -> ModelCosts:
    """Return the costs of a model file for the planner: the real bytes of its layers, as quantised in the file.

    Raises:
        ModelUnsupported: it is not a transformer with layers, or they cannot be cut apart.
    """
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
        d_ff=known.d_ff,
    )  # fmt: skip


def rpc_costs(file: ModelFile, cache: float = 0.0, compute: float = 0.0) -> RpcModelCosts:
    """Return the costs of a model for a plan over RPC. `cache` bytes of all layers' caches, `compute` bytes to compute
    in. Layers that predict further tokens (MTP) are left out: they are not loaded.

    Raises:
        ModelUnsupported: the file does not say how many layers it has, or lacks an embedding.
    """
    header = file.header
    count, table = text_layers(header), header.tensor(EMBEDDING)
    if not count or table is None:
        raise ModelUnsupported(f"{file.path} has no layers or no {EMBEDDING}.", "Use a complete language model.")
    sizes, read, products = [0] * count, [0.0] * count, [0.0] * count
    head = outside = 0
    share = _used_experts(header)
    for tensor in header.tensors:
        if (at := tensor.layer) is not None:
            if at < count:
                used = share if _EXPERTS in tensor.name else 1.0
                sizes[at] += tensor.nbytes
                read[at] += used * tensor.nbytes
                products[at] += used * tensor.n_elements
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
        else:
            outside += tensor.nbytes
    matrix = header.tensor(HEAD, EMBEDDING) or table
    if matrix.name == EMBEDDING:  # the head is the embedding once more
        head += table.nbytes
    width, vocabulary = table.shape[0], table.shape[-1]
    return RpcModelCosts(
        file.name, tuple(sizes), tuple(read), tuple(products), head, float(matrix.n_elements), outside, width,
        vocabulary, cache / count, compute,
    )  # fmt: skip


def _used_experts(header: GgufHeader) -> float:
    """Return the share of a layer's experts that a token goes through; 1 where there are none."""
    known = [header.metadata.get(f"{header.architecture}.expert_{name}count") for name in ("used_", "")]
    used, all_of_them = (value if isinstance(value, int) and value > 0 else 1 for value in known)
    return min(1.0, used / all_of_them)

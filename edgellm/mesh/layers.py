"""What a GGUF asks of the devices that hold it, read from its header: the planner's record of a model."""

from __future__ import annotations

import re
from pathlib import Path

from edgellm.coldstart.model import Model, Shape
from edgellm.engine.gguf import GgufHeader, check_gguf
from edgellm.errors import ModelUnsupported

_BLOCK = re.compile(r"blk\.(\d+)\.")


def model_of(path: Path, header: GgufHeader | None = None) -> Model:
    """The layers of a model file as the planner sees them: real bytes, quantised as they are. `header`: the file's, if
    it has been read.

    Raises what `check_gguf` raises, and `ModelUnsupported` for a file that is no transformer with layers.
    """
    header = header or check_gguf(path)
    shape, name = _shape(header, path), str(header.metadata.get("general.name") or path.stem)
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
    return Model(name, shape, tuple(weights), cache, embedding, head, tied, 2.0 * shape.d_model * vocabulary)


def _shape(header: GgufHeader, path: Path) -> Shape:
    family = header.architecture

    def number(key: str, default: int | None = None) -> int:
        """A whole number; of one for each layer the largest."""
        value = header.metadata.get(f"{family}.{key}", default)
        value = max(value) if isinstance(value, tuple) and value else value
        if not isinstance(value, int) or value < 1:
            raise ModelUnsupported(
                f"{path} does not say its {family or 'architecture'}.{key}: it is {value!r}.",
                "Use a transformer language model in GGUF.",
            )
        return value

    d_model, heads = number("embedding_length"), number("attention.head_count")
    experts = number("expert_used_count", 1)
    d_ff = number("expert_feed_forward_length" if experts > 1 and f"{family}.expert_feed_forward_length"
                  in header.metadata else "feed_forward_length")  # fmt: skip
    return Shape(
        layers=number("block_count"),
        d_model=d_model,
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        d_head=number("attention.key_length", d_model // heads),
        d_ff=d_ff * experts,
    )

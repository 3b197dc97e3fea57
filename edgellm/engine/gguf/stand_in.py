"""Layers of a plain transformer that stand in for those of a model that cannot be cut, to time a device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

from edgellm.engine.gguf.reader import TENSOR_TYPES, Dimensions, ModelFile, text_layers
from edgellm.engine.gguf.synthetic_layers import ENOUGH, Blocks
from edgellm.engine.gguf.writer import NewTensor, number, portions, real, text, zeros
from edgellm.errors import ModelUnsupported

_SLIVER = 32  # rows of an embedding that is never read
_HEAD = 64  # columns of an attention's head
_EXPANSION = 4  # of the feed-forward part
_F32, _F16 = 0, 1


def stand_in(model: ModelFile) -> tuple[Blocks, Dimensions]:
    """Return layers with the width and the most frequent quantisation of a model's, and what they look like.

    Raises:
        ModelUnsupported: the file does not say how wide its rows are, or has no layers.
    """
    header = model.header
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    sizes: Counter[int] = Counter()
    for tensor in header.tensors:
        if tensor.name.startswith("blk."):
            sizes[tensor.kind] += tensor.nbytes
    if not isinstance(width, int) or width < 1 or not sizes:
        raise ModelUnsupported(f"{model.path} does not say how wide its rows are.", "Use a complete language model.")
    kind = sizes.most_common(1)[0][0]
    kind = kind if width % TENSOR_TYPES[kind][1] == 0 else _F16
    heads = width // _HEAD if width % _HEAD == 0 else 1
    known = Dimensions(1, width, _EXPANSION * width, heads, heads, width // heads, width // heads)
    weights = sum(t.nbytes for t in _layer(known, kind, 0))
    layers = min(max(1, text_layers(header)), math.ceil(ENOUGH / weights))
    known = replace(known, layers=layers)
    tensors = [
        _tensor("token_embd.weight", (width, _SLIVER), kind), _tensor("output_norm.weight", (width,), _F32),
        *(tensor for layer in range(layers) for tensor in _layer(known, kind, layer)),
    ]  # fmt: skip
    data = portions(header, _entries(known), tensors)
    head = bytes(next(data))
    return Blocks(head, sum(len(portion) for portion in data), layers, width), known


def _entries(known: Dimensions) -> list[bytes]:
    numbers = {
        "block_count": known.layers, "context_length": 4_096, "embedding_length": known.d_model,
        "feed_forward_length": known.d_ff, "attention.head_count": known.heads,
        "attention.head_count_kv": known.kv_heads, "rope.dimension_count": known.keys, "vocab_size": _SLIVER,
    }  # fmt: skip
    return [
        text("general.architecture", "llama"), real("llama.attention.layer_norm_rms_epsilon", 1e-5),
        *(number(f"llama.{key}", value) for key, value in numbers.items()), text("tokenizer.ggml.model", "no_vocab"),
    ]  # fmt: skip


def _layer(known: Dimensions, kind: int, layer: int) -> list[NewTensor]:
    width, ff = known.d_model, known.d_ff
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)),
        "ffn_gate": (width, ff), "ffn_up": (width, ff), "ffn_down": (ff, width),
    }  # fmt: skip
    norms = [_tensor(f"blk.{layer}.{name}.weight", (width,), _F32) for name in ("attn_norm", "ffn_norm")]
    return [*norms, *(_tensor(f"blk.{layer}.{name}.weight", shape, kind) for name, shape in shapes.items())]


def _tensor(name: str, shape: tuple[int, ...], kind: int) -> NewTensor:
    _name, block, size = TENSOR_TYPES[kind]
    nbytes = math.prod(shape) // block * size
    return NewTensor(name, shape, kind, nbytes, partial(zeros, nbytes))

"""A model's layers in numbers, for a plan: their shape, and the bytes that they take besides their weights: caches, and
buffers of a batch. And layers that stand in for those of a model that cannot be cut."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial

from edgellm.coldstart.costs import TransformerShape
from edgellm.engine import GgufHeader, ModelFile, native
from edgellm.engine.gguf.cuttable import SLIVER
from edgellm.engine.gguf.header import F16, F32, TENSOR_TYPES, TensorInfo
from edgellm.engine.gguf.synthetic_layers import ENOUGH, Blocks
from edgellm.engine.gguf.writer import NewTensor, entry, portions, zeros
from edgellm.engine.hardware import CACHE_TYPES
from edgellm.errors import ModelUnsupported

_OUTPUT, _FLASH, _PLAIN = 2, 5, 9  # rows of the embedding's width that live beside the largest tensors of a pass


def shape_of(header: GgufHeader) -> TransformerShape:
    """Return the shape of a model's layers, without those that predict further tokens; where they differ from layer to
    layer, the largest. The width of the feed-forward part is summed over the experts that a token goes through. Raise
    ModelUnsupported where the header does not say what the layers look like."""

    def number(key: str, default: int = 0) -> int:
        value = header.number(key, default)
        if value < 1:
            arch = header.architecture or "architecture"
            what = f"The model does not say its {arch}.{key}: it is {header.metadata.get(f'{arch}.{key}')!r}."
            raise ModelUnsupported(what, "Use a transformer language model in GGUF.")
        return value

    d_model, heads = number("embedding_length"), number("attention.head_count")
    expert = f"{header.architecture}.expert_feed_forward_length" in header.metadata
    width = number("expert_feed_forward_length" if expert else "feed_forward_length")
    return TransformerShape(
        layers=number("block_count") - header.mtp_layers, d_model=d_model, heads=heads,
        kv_heads=number("attention.head_count_kv", heads), d_head=number("attention.key_length", d_model // heads),
        d_ff=width * number("expert_used_count", 1), bytes_per_activation=4.0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The sizes of a model's graph that decide its memory; `params` is the number of weights of one layer.

    `kv`: bytes of keys and values of one layer for one position. `exact`: computed without flash attention, in f32.
    """

    kv: int
    heads: int
    width: int
    ff: int
    vocabulary: int
    params: int
    exact: bool

    def cache(self, layers: int, context: int, sessions: int) -> int:
        """Return the bytes of these layers' keys and values, for `sessions` sequences of `context` positions each."""
        return self.kv * layers * sessions * cells(context)

    def batch(self, layers: int, context: int, rows: int, *, ends: bool) -> int:
        """Return the bytes of the buffers in which a block of these layers computes `rows` rows.

        `ends`: the block has the embedding, or the head. Within some percent of llama.cpp's buffers on a processor
        (`test_memory.py`): the largest tensors that live at once are the feed-forward part's, the attention's scores
        (none with flash attention), or the logits.
        """
        params = self.params * layers + (self.vocabulary * self.width if ends else 0)
        flash = not self.exact and native.flash_pays(params, rows)
        largest = max(
            3 * self.ff + _FLASH * self.width,
            self.vocabulary + _OUTPUT * self.width if ends else 0,
            0 if flash else self.heads * cells(context) + _PLAIN * self.width,
        )
        return rows * (4 * largest + cells(context) * (2 if flash else 4))


def cells(context: int) -> int:
    """Return the cells of a cache for so many positions: llama.cpp rounds them up."""
    return -(-context // 256) * 256


def costs_of(header: GgufHeader, cache_type: str | None = None) -> MemoryEstimate:
    """Return the estimate for a model that can be cut, or for some of its layers, with keys and values of that type.
    Raises as `shape_of`."""
    shape = shape_of(header)
    _name, values, size = TENSOR_TYPES[CACHE_TYPES["f32" if header.is_f32 else cache_type or "f16"]]
    kept = shape.d_head + header.number("attention.value_length", shape.d_model // shape.heads)
    ends = [t.shape[-1] for t in header.tensors if t.name in ("token_embd.weight", "output.weight")]
    weights = sum(t.n_elements for t in header.tensors if t.layer is not None)
    return MemoryEstimate(
        kv=shape.kv_heads * kept * size // values, heads=shape.heads, width=shape.d_model, ff=shape.d_ff,
        vocabulary=max(ends, default=1), params=weights // shape.layers, exact=header.is_f32,
    )  # fmt: skip


def stand_in(model: ModelFile) -> tuple[Blocks, TransformerShape]:
    """Return layers of a usual transformer with a model's width and most frequent quantisation, and their shape. Raise
    ModelUnsupported where the file does not say how wide its rows are, or has no layers."""
    header, sizes = model.header, Counter[int]()
    width = header.number("embedding_length")
    for tensor in header.tensors:
        sizes[tensor.kind] += tensor.nbytes if tensor.layer is not None else 0
    if width < 1 or not sizes.total():
        raise ModelUnsupported(f"{model.path} does not say how wide its rows are.", "Use a complete language model.")
    kind = sizes.most_common(1)[0][0]
    kind = kind if width % TENSOR_TYPES[kind][1] == 0 else F16
    heads = width // 64 if width % 64 == 0 else 1
    ff = 4 * width
    shapes = {
        "attn_norm": (width,), "ffn_norm": (width,),
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)),
        "ffn_gate": (width, ff), "ffn_up": (width, ff), "ffn_down": (ff, width),
    }  # fmt: skip

    def tensor_of(name: str, shape: tuple[int, ...]) -> NewTensor:
        tensor = TensorInfo(name, shape, kind if len(shape) > 1 else F32)
        return tensor, partial(zeros, tensor.nbytes)

    weights = sum(tensor_of(name, shape)[0].nbytes for name, shape in shapes.items())
    layers = min(max(1, header.text_layers), math.ceil(ENOUGH / weights))
    numbers = {
        "block_count": layers, "context_length": 4_096, "embedding_length": width, "feed_forward_length": ff,
        "attention.head_count": heads, "attention.head_count_kv": heads, "rope.dimension_count": width // heads,
        "vocab_size": SLIVER, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    names = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    entries = names | {f"llama.{key}": value for key, value in numbers.items()}
    tensors = [tensor_of("token_embd.weight", (width, SLIVER)), tensor_of("output_norm.weight", (width,))]
    for layer in range(layers):
        tensors += (tensor_of(f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())
    data = portions(header, [entry(key, value) for key, value in entries.items()], tensors)
    blocks = Blocks(bytes(next(data)), sum(map(len, data)), layers, width)
    return blocks, TransformerShape(layers, width, heads, heads, width // heads, ff, bytes_per_activation=4.0)

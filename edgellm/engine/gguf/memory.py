"""The dimensions of a model's layers, and the bytes that they take besides their weights: caches, buffers of a batch,
and llama.cpp's own."""

from dataclasses import dataclass

from edgellm.engine import native
from edgellm.engine.gguf.header import TENSOR_TYPES, GgufHeader
from edgellm.engine.hardware import CACHE_TYPES
from edgellm.errors import ModelUnsupported

PREDICTED_ROWS = 32
"""Rows of logits in a batch that predicts a text's tokens: 19 MB at 152,000 tokens."""
_CHECKED_ROWS = 9  # rows of logits for each sequence in a batch that verifies drafts
_OUTPUT, _FLASH, _PLAIN = 2, 5, 9  # rows of the embedding's width that live beside the largest tensors of a pass


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model's layers; where they differ from layer to layer, the largest.

    `layers`: without those that predict further tokens. `d_ff`: the width of the feed-forward part, summed over the
    experts that a token goes through. `keys`, `values`: elements that each head keeps for a position.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    keys: int
    values: int


def dimensions(header: GgufHeader) -> Dimensions:
    """Return the dimensions of a model, or of some of its layers. Raise ModelUnsupported where the header does not say
    what they look like."""

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
    return Dimensions(
        layers=number("block_count") - header.mtp_layers, d_model=d_model,
        d_ff=width * number("expert_used_count", 1), heads=heads,
        kv_heads=number("attention.head_count_kv", heads), keys=number("attention.key_length", d_model // heads),
        values=number("attention.value_length", d_model // heads),
    )  # fmt: skip


def output_rows(n_seq: int, n_batch: int) -> int:
    """Return the most rows of logits in a batch of `n_batch` rows of `n_seq` sequences."""
    return min(n_batch, max(PREDICTED_ROWS, _CHECKED_ROWS * n_seq))


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
    Raises as `dimensions`."""
    known = dimensions(header)
    _name, values, size = TENSOR_TYPES[CACHE_TYPES["f32" if header.is_f32 else cache_type or "f16"]]
    ends = [t.shape[-1] for t in header.tensors if t.name in ("token_embd.weight", "output.weight")]
    weights = sum(t.n_elements for t in header.tensors if t.layer is not None)
    return MemoryEstimate(
        kv=known.kv_heads * (known.keys + known.values) * size // values, heads=known.heads, width=known.d_model,
        ff=known.d_ff, vocabulary=max(ends, default=1), params=weights // known.layers, exact=header.is_f32,
    )  # fmt: skip

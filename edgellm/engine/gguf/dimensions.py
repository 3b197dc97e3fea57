"""The dimensions of a transformer, as a GGUF's header gives them."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.engine.gguf.reader import GgufHeader
from edgellm.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model's layers; where they differ from layer to layer, the largest.

    `d_ff`: the width of the feed-forward part, summed over the experts that a token goes through. `keys`, `values`:
    elements that each head of keys and values keeps for a position.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    keys: int
    values: int


def dimensions(header: GgufHeader) -> Dimensions:
    """Return the dimensions of a model, or of some of its layers.

    Raises:
        ModelUnsupported: the header does not say what its layers look like.
    """
    arch = header.architecture

    def number(key: str, default: int | None = None) -> int:
        value = header.metadata.get(f"{arch}.{key}", default)
        value = max(value) if isinstance(value, tuple) and value else value
        if not isinstance(value, int) or value < 1:
            what = f"The model does not say its {arch or 'architecture'}.{key}: it is {value!r}."
            raise ModelUnsupported(what, "Use a transformer language model in GGUF.")
        return value

    d_model, heads = number("embedding_length"), number("attention.head_count")
    expert = header.metadata.get(f"{arch}.expert_feed_forward_length") is not None
    width = number("expert_feed_forward_length" if expert else "feed_forward_length")
    return Dimensions(
        layers=number("block_count"), d_model=d_model, d_ff=width * number("expert_used_count", 1), heads=heads,
        kv_heads=number("attention.head_count_kv", heads), keys=number("attention.key_length", d_model // heads),
        values=number("attention.value_length", d_model // heads),
    )  # fmt: skip

"""What a context keeps of each token and of each sequence, in bytes, by the header of a model."""

from __future__ import annotations

from edgellm.engine.gguf.reader import GgufHeader, attention_layers, text_layers

_LIGHTNING = "minimax-01"
"""The architecture of lightning attention, whose layers have a state for each head."""


def cache_bytes_per_token(header: GgufHeader) -> int:
    """Return at most how many bytes of keys and values a token takes, in 16 bits; 0 where the header does not say."""
    heads = _number(header, "attention.head_count")
    if not heads:
        return 0
    size = _number(header, "embedding_length") // heads
    width = _number(header, "attention.key_length", size) + _number(header, "attention.value_length", size)
    return 2 * len(attention_layers(header)) * _number(header, "attention.head_count_kv", heads) * width


def recurrent_state_bytes(header: GgufHeader) -> int:
    """Return how many bytes the recurrent layers' states of one sequence take, as llama.cpp keeps them in 32 bits; 0
    where there are none, or the header does not say."""
    width, heads = _number(header, "embedding_length"), _number(header, "attention.head_count")
    if head := _number(header, "wkv.head_size"):
        state = width * (head + (_number(header, "token_shift_count") or 2))
    elif kernel := _number(header, "shortconv.l_cache"):
        state = width * (kernel - 1)
    elif head := _number(header, "kda.head_dim"):
        state = heads * head * (head + 3 * (max(0, _number(header, "ssm.conv_kernel") - 1) or 3))
    elif header.architecture == _LIGHTNING:
        state = heads * (_number(header, "attention.key_length") or width // max(1, heads)) ** 2
    else:
        inner, size = _number(header, "ssm.inner_size"), _number(header, "ssm.state_size")
        read = max(0, _number(header, "ssm.conv_kernel") - 1)
        state = inner * size + read * (inner + 2 * _number(header, "ssm.group_count") * size)
    return 4 * _recurrent_layers(header) * state


def sliding_window(header: GgufHeader) -> int:
    """Return the positions of the sliding window that some layers attend to; 0 where the header tells of none."""
    return _number(header, "attention.sliding_window")


def _recurrent_layers(header: GgufHeader) -> int:
    """Return the number of layers with a recurrent state, if any have one: those without attention, or all of those
    that have both; layers of a feed-forward part alone are left out."""
    count, with_attention = text_layers(header), attention_layers(header)
    if len(with_attention) in (0, count):
        return count
    wide = header.metadata.get(f"{header.architecture}.feed_forward_length")
    alone = wide if isinstance(wide, tuple) and 0 in wide else ()
    return sum(layer not in with_attention and not any(alone[layer : layer + 1]) for layer in range(count))


def _number(header: GgufHeader, key: str, default: int = 0) -> int:
    """Return a hyperparameter, of those of several layers the largest; `default` where the header does not say."""
    value = header.metadata.get(f"{header.architecture}.{key}", default)
    value = max(value, default=0) if isinstance(value, tuple) else value
    return value if isinstance(value, int) else default

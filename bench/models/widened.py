"""Write models of any architecture that take as much memory as real ones, with random weights in 16 bits or fewer.

Those of `testkit.gguf.architectures` are so small that what llama.cpp takes for itself hides what a model takes. Here
rows and heads are as wide as in real models, windows have 1,024 positions, and llama.cpp's own quantiser writes the
file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf

from edgellm.engine import native
from edgellm.engine.native import lib
from testkit.gguf.architectures import ARCHITECTURES, TokenizerEntry, Value, write
from testkit.gguf.random_model import CHAT_TEMPLATE, vocabulary

_HEADS = 4  # times as wide a head
_BY_HEAD = frozenset({
    "attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
    "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla", "attention.indexer.key_length",
    "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections", "ssm.state_size", "kda.head_dim",
})  # fmt: skip
_COUNTS = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.output_group_count", "ssm.time_step_rank",
    "ssm.group_count",
})  # fmt: skip
_WIDTHS = frozenset({
    "embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "embedding_length_per_layer_input", "ssm.inner_size", "attention.q_lora_rank", "attention.output_lora_rank",
})  # fmt: skip
_WINDOW = 1_024
_FEWER = frozenset({"gemma3n", "gemma4", "exaone4", "jamba", "minimax-01", "rwkv6", "rwkv7"})
"""Those that are wide, or have many layers, as they are."""
_PER_LAYER = frozenset({"gemma3n", "gemma4"})
"""Those with an embedding for each layer, which keep the small vocabulary of the bundled pair."""
_TOKENS = 32_000
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7}  # llama.cpp's llama_ftype


@dataclass(frozen=True, slots=True)
class Widened:
    """How a model is widened: hyperparameters that differ from those of `testkit.gguf.architectures`, and the entries
    of another vocabulary; none where it keeps that of the bundled pair."""

    sizes: dict[str, Value]
    tokenizer: Sequence[TokenizerEntry]


def widened(name: str, n_ctx: int, *, times: int | None = None, tokens: int = _TOKENS) -> Widened:
    """Return the architecture `name` with heads of four times the width and `times` as many of them, for contexts of up
    to `n_ctx` positions, with a vocabulary of so many `tokens`."""
    times = times or (2 if name in _FEWER else 4)
    sizes: dict[str, Value] = {"context_length": n_ctx}
    for key, value in ARCHITECTURES[name].metadata.items():
        if key in _BY_HEAD:
            sizes[key] = _multiplied(value, _HEADS)
        elif key in _WIDTHS:
            sizes[key] = _multiplied(value, _HEADS * times)
        elif key in _COUNTS and not (key.endswith("_kv") and _most(value) == 1):  # one head stays one
            sizes[key] = _multiplied(value, times)
        elif key == "attention.sliding_window":
            sizes[key] = _WINDOW
    return Widened(sizes, () if name in _PER_LAYER else _tokenizer(tokens))


def write_widened(name: str, path: Path, model: Widened, kind: str = "F16") -> None:
    """Write a model with its matrices in the type `kind`. Takes the space of a file in 32 bits besides, for a while.

    Raises ValueError if llama.cpp refuses the hyperparameters; some that do not fit each other end the process.
    """
    whole = path.with_suffix(".f32")
    try:
        write(name, whole, sizes=model.sizes, tokenizer=model.tokenizer)
        native.start()
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = _FILE_TYPES[kind], 1
        if lib.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.pointer(params)):
            raise ValueError(f"llama.cpp cannot write {name} in {kind}")
    finally:
        whole.unlink(missing_ok=True)


def _tokenizer(tokens: int) -> list[TokenizerEntry]:
    """Return the entries of a made vocabulary of that size."""
    texts, kinds, merges = vocabulary(tokens)
    kind = gguf.GGUFValueType
    return [
        TokenizerEntry("tokenizer.ggml.model", "gpt2", kind.STRING),
        TokenizerEntry("tokenizer.ggml.pre", "qwen2", kind.STRING),
        TokenizerEntry("tokenizer.ggml.tokens", texts, kind.ARRAY, kind.STRING),
        TokenizerEntry("tokenizer.ggml.token_type", kinds, kind.ARRAY, kind.INT32),
        TokenizerEntry("tokenizer.ggml.merges", merges, kind.ARRAY, kind.STRING),
        TokenizerEntry("tokenizer.ggml.bos_token_id", tokens - 3, kind.UINT32),
        TokenizerEntry("tokenizer.ggml.eos_token_id", tokens - 1, kind.UINT32),
        TokenizerEntry("tokenizer.chat_template", CHAT_TEMPLATE, kind.STRING),
    ]


def _multiplied(value: Value, factor: int) -> Value:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [factor * one for one in value]
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no size")
    return factor * value


def _most(value: Value) -> Value:
    return max(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

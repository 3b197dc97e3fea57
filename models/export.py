"""Writes a trained network as a GGUF that stock llama.cpp loads: llama architecture, byte-level BPE, chat template.

It also reads the weights back, to train on from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch

from models.net import EPSILON, ROPE_BASE
from models.recipe import Shape
from models.rendering import END, SPECIAL, START, TEMPLATE

BLOCK_TENSORS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def export(
    state: dict[str, torch.Tensor],
    shape: Shape,
    name: str,
    add_tokenizer: Callable[[gguf.GGUFWriter], None],
    path: Path,
) -> None:
    """Write `path`: matrices as Q8_0, norms as f32, and an untied head."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_description("A tiny model, made with edgellm")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    add_tokenizer(writer)
    for ours, key in _names(shape):
        array = state[ours].detach().cpu().numpy().astype(np.float32)
        if array.ndim == 1:
            writer.add_tensor(key, array)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights_of(path: Path, shape: Shape) -> dict[str, torch.Tensor]:
    """Return the weights of an exported GGUF, as exactly as Q8_0 has kept them."""
    kept = {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(path).tensors
    }
    return {ours: kept[theirs] for ours, theirs in _names(shape)}


def _names(shape: Shape) -> list[tuple[str, str]]:
    """Return the names of every weight, here and in the file."""
    named = [
        ("embedding.weight", "token_embd.weight"),
        ("norm.weight", "output_norm.weight"),
        ("output.weight", "output.weight"),
    ]
    for layer in range(shape.layers):
        for ours, theirs in BLOCK_TENSORS.items():
            named.append((f"blocks.{layer}.{ours}.weight", f"blk.{layer}.{theirs}.weight"))
    return named


def learned_tokenizer(path: Path) -> Callable[[gguf.GGUFWriter], None]:
    """Return what adds the tokenizer that `path` holds, with the chat template of this folder."""
    return lambda writer: _add_learned(writer, path)


def tokenizer_of(model: Path) -> Callable[[gguf.GGUFWriter], None]:
    """Return what adds the tokenizer and the chat template of another GGUF."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, field in gguf.GGUFReader(model).fields.items():
            if name.startswith("tokenizer."):
                kind, *inner = field.types
                writer.add_key_value(name, field.contents(), kind, *inner)

    return add


def _add_learned(writer: gguf.GGUFWriter, path: Path) -> None:
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(START))
    writer.add_eos_token_id(tokens.index(END))
    writer.add_eot_token_id(tokens.index(END))
    writer.add_pad_token_id(tokens.index(END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

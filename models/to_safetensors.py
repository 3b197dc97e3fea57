"""Write a bundled model as the folder that vLLM, SGLang and transformers load: weights in f32, config and tokenizer.

    python -m models.to_safetensors models/verifier.gguf FOLDER     # needs: pip install -e '.[train]'

llama.cpp turns neighbouring numbers of a head by one angle, transformers the numbers half a head apart; so the rows of
queries and keys change places.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from models.rendering import END, SPECIAL, START, TEMPLATE

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""What transformers calls a tensor of the file, in a layer or outside."""


def convert(source: Path, folder: Path) -> None:
    """Write the model in the file `source`, which has its tokenizer beside it, into `folder`, which is made."""
    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "q_proj.weight": int(facts["llama.attention.head_count"]),
        "k_proj.weight": int(facts["llama.attention.head_count_kv"]),
    }
    weights = {}
    for tensor in reader.tensors:
        array = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _name(tensor.name)
        n = heads.get(name.partition("self_attn.")[2])
        weights[name] = array if n is None else _by_halves(array, n)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = facts["tokenizer.ggml.tokens"]
    texts: dict[str, Any] = {
        "config.json": _config(facts, tokens.index(START), tokens.index(END)),
        "generation_config.json": {"bos_token_id": tokens.index(START), "eos_token_id": tokens.index(END)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": END, "pad_token": END,
            "additional_special_tokens": list(SPECIAL), "add_bos_token": False, "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False, "model_max_length": int(facts["llama.context_length"]),
        },
    }  # fmt: skip
    for name, found in texts.items():
        (folder / name).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(source.with_name("tokenizer.json").read_bytes())


def _name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight" if parts[0] == "blk" else f"{NAMES[parts[0]]}.weight"


def _by_halves(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return a matrix (rows, columns) of queries or keys whose pairs of rows are half a head apart."""
    rows, columns = array.shape
    halves = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))


def _config(facts: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    width, heads = int(facts["llama.embedding_length"]), int(facts["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "torch_dtype": "float32",
        "vocab_size": int(facts["llama.vocab_size"]), "hidden_size": width, "num_attention_heads": heads,
        "num_key_value_heads": int(facts["llama.attention.head_count_kv"]), "head_dim": width // heads,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]), "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "rms_norm_eps": float(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(facts["llama.rope.freq_base"]), "tie_word_embeddings": False,
        "max_position_embeddings": int(facts["llama.context_length"]), "bos_token_id": start, "eos_token_id": end,
    }  # fmt: skip


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
